"""The command line: one file per command. Only commands that need torch import it."""

import os
import sys

from peagle.cli.bytecode import keep_bytecode
from peagle.cli.parallel_bytecode import compile_missing, loads_models

if "torch" not in sys.modules:
    keep_bytecode(os.environ)
    if loads_models(sys.argv):
        compile_missing()

from peagle.cli.application import app
from peagle.cli.deployment import deploy, deploy_sagemaker, sagemaker, verify
from peagle.cli.learning import from_log, status, versions
from peagle.cli.measurement import bench, bench_step, compare, cost, evaluate, report, tune
from peagle.cli.pairs import catalog, catalog_add, check, export, pull, quantize
from peagle.cli.serving import demo, doctor, generate, serve
from peagle.cli.training import capture, make_drafter, regenerate, train

COMMANDS = (  # importing a command registers it
    *(deploy, deploy_sagemaker, sagemaker, verify),
    *(bench, bench_step, compare, cost, evaluate, report, tune),
    *(catalog, catalog_add, check, export, pull, quantize),
    *(demo, doctor, generate, serve),
    *(capture, make_drafter, regenerate, train),
    *(status, versions, from_log),
)
__all__ = ["COMMANDS", "app"]
