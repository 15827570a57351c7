import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.catalog import find_pair
from peagle.cli.application import err, warn
from peagle.cli.deployment import options as option
from peagle.cli.deployment.deploy import deploy_app
from peagle.cli.deployment.spinner import spinner
from peagle.cli.deployment.verify import (
    exit_unless_proven,
    print_verification,
    verify_sagemaker,
)
from peagle.cli.options import Json, K, Method
from peagle.deploy.options import DeployOptions
from peagle.deploy.sagemaker.plan.choices import Autoscale, EndpointSettings
from peagle.deploy.spec import dns_label
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.plan import Plan
    from peagle.deploy.sagemaker.operate.apply import StepResult
    from peagle.deploy.sagemaker.operate.clients import Clients
    from peagle.deploy.sagemaker.resources.stack import Stack
    from peagle.deploy.verify import Verification

HELP = (
    "Create or update a SageMaker endpoint.\n\n"
    "The same command again changes nothing; other options update the endpoint, blue/green.\n\n"
    "Example: peagle deploy sagemaker gpt-oss-20b --role ARN --region us-west-2"
    " --autoscale 1 4 8 --dry-run"
)


@deploy_app.command("sagemaker", help=HELP)
def sagemaker(
    pair: option.PairName,
    role: option.Role,
    instance: option.Instance = None,
    region: option.Region = None,
    name: option.EndpointName = None,
    dry_run: option.DryRun = False,
    output_format: option.OutputFormat = "json",
    autoscale: option.AutoscaleLimits = None,
    wait: option.Wait = False,
    verify: option.Verify = False,
    bucket: option.Bucket = None,
    owner: option.BucketOwner = None,
    from_hub: option.FromHub = False,
    image: option.ContainerImage = None,
    learn: option.EndpointLearn = False,
    k: K = None,
    method: Method = None,
    concurrency: option.Concurrency = None,
    context: option.Context = None,
    drafter: option.EndpointDrafter = None,
    count: option.InstanceCount = 1,
    gpus: option.InstanceGpus = None,
    variables: option.Variables = None,
    secrets: option.Secrets = None,
    public: option.PublicVariables = None,
    isolated: option.Isolated = None,
    ami: option.Ami = None,
    startup_seconds: option.StartupSeconds = 1800,
    notify: option.Notify = None,
    upload_only: option.UploadOnly = False,
    profile: option.Profile = None,
    as_json: Json = False,
) -> None:
    settings = EndpointSettings(
        role=role,
        **pair_defaults(pair, name, instance, region),
        count=count,
        autoscale=Autoscale(*autoscale) if autoscale else None,
        from_hub=from_hub,
        isolated=not from_hub if isolated is None else isolated,
        startup_seconds=startup_seconds,
        learn=learn,
        **variable_settings(variables or [], secrets or [], public or []),
        **without_empty(bucket=bucket, bucket_owner=owner, image=image, ami=ami, notify=notify),
    )
    options = DeployOptions(k, concurrency, drafter, method, context=context)
    plan = plan_endpoint(pair, settings, options, gpus)
    if dry_run:
        return print_dry_run(settings, plan, output_format)
    results = deploy_endpoint(settings, plan, profile, wait or verify, upload_only, as_json)
    return report(settings, results, upload_only, as_json, verify and not upload_only, profile)


def without_empty(**texts: str | None) -> dict[str, Any]:
    return {name: text for name, text in texts.items() if text}


def pair_defaults(
    pair: str, name: str | None, instance: str | None, region: str | None
) -> dict[str, Any]:
    """Name, instance and region of the endpoint, with the defaults of the pair."""
    entry = find_pair(pair)
    if not instance and entry.production.instances:
        instance = entry.production.instances[0]
    if not instance:
        raise UserError(f"--instance is missing, and the catalog has no instance type for {pair}")
    if not region:
        raise UserError("--region is missing: give it, or set AWS_REGION")
    default_name = f"peagle-{dns_label(Path(entry.name).name)}"
    return {"name": name or default_name, "instance": instance, "region": region}


def variable_settings(env: list[str], secrets: list[str], public: list[str]) -> dict[str, Any]:
    secret = frozenset(word.partition("=")[0] for word in secrets)
    if both := sorted(secret & set(public)):
        raise UserError(f"{both[0]} is given by --secret and by --public: omit one of them")
    variables = container_variables(env, secrets)
    return {"variables": variables, "public": frozenset(public), "secret": secret}


def container_variables(env: list[str], secrets: list[str]) -> dict[str, str]:
    """The variables of --env NAME=VALUE and of --secret NAME or NAME=@FILE."""
    variables = {}
    for word in env:
        name, separator, value = word.partition("=")
        if not separator:
            raise UserError(
                "--env is not NAME=VALUE: use `--secret NAME` for a value of this environment"
            )
        variables[name] = value
    for word in secrets:
        name, value = read_secret(word)
        if name in variables:
            raise UserError(f"{name} is given by --env and by --secret: omit one of them")
        variables[name] = value
    return variables


def read_secret(word: str) -> tuple[str, str]:
    """NAME or NAME=@FILE -> the name and its value."""
    name, separator, source = word.partition("=")
    if not separator:
        if name not in os.environ:
            raise UserError(f"--secret {name}: the environment has no such variable, so export it")
        return name, os.environ[name]
    if not source.startswith("@"):
        raise UserError(
            f"--secret {name}: other users of this machine see values on the command line,"
            " so use NAME or NAME=@FILE"
        )
    try:
        return name, Path(source[1:]).expanduser().read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--secret {name}: cannot read {source[1:]} ({error})") from error


def plan_endpoint(
    name: str, settings: EndpointSettings, options: DeployOptions, gpus: int | None
) -> "Plan":
    """Plan the deployment and check it, before the first call of AWS."""
    from peagle.deploy.plan import plan
    from peagle.deploy.sagemaker.plan.instances import instance_types

    instance = instance_types().get(settings.instance)
    default_gpus = instance.gpus if instance and not settings.learn else 1
    if settings.learn and (gpus or 1) > 1:
        raise UserError("--learn needs the native engine, which uses one GPU: omit --gpus")
    endpoint_plan = plan(
        name, "sagemaker", replace(options, vllm=settings.vllm, gpus=gpus or default_gpus)
    )
    if settings.from_hub and endpoint_plan.deployment.local:
        raise UserError(f"target or drafter of {name} are only on this machine: omit --from-hub")
    for note in plan_notes(settings, endpoint_plan):
        warn(note)
    return endpoint_plan


def plan_notes(settings: EndpointSettings, plan: "Plan") -> list[str]:
    from peagle.deploy.sagemaker.plan.artifact import target_artifact
    from peagle.deploy.sagemaker.plan.limits import check_memory
    from peagle.pull import target_folder

    notes = [*plan.deployment.notes, *check_memory(settings.instance, plan.deployment)]
    if settings.learn:
        notes.append("what is learned lies on the instance: a replaced instance begins anew")
    elif settings.vllm is None:
        notes.append(
            f"the version of vLLM in {settings.image} is unknown:"
            " whether it serves the pair was not checked"
        )
    downloads_tiktoken = settings.isolated and "gpt-oss" in plan.deployment.target
    if downloads_tiktoken and not target_artifact(plan.pair).has_tiktoken_files:
        notes.append(
            "gpt-oss downloads o200k_base.tiktoken at startup, which fails without a network:"
            f" put the file into {target_folder(plan.pair)}, or use --no-isolated"
        )
    return notes


def print_dry_run(settings: EndpointSettings, plan: "Plan", output_format: str) -> None:
    from peagle.deploy.sagemaker.output.cloudformation import cloudformation_template
    from peagle.deploy.sagemaker.output.dry_run import dry_run_steps
    from peagle.deploy.sagemaker.output.terraform import terraform_config
    from peagle.deploy.sagemaker.plan.artifact import drafter_artifact, target_artifact
    from peagle.deploy.sagemaker.resources.stack import build_stack

    target = target_artifact(plan.pair)
    drafter = drafter_artifact(plan, target)
    for artifact in (target, drafter):
        unpinned = artifact.folder is None and artifact.source.endswith(" at main")
        if unpinned and not settings.from_hub:
            warn(
                f"{artifact.source} is not on this machine:"
                " after the download, its commit replaces `main` in all names"
            )
    channel = output_format != "cloudformation"
    stack = build_stack(settings, plan.deployment, target, drafter, channel)
    if output_format == "json":
        document: Any = dry_run_steps(stack)
    elif output_format == "cloudformation":
        document = cloudformation_template(stack)
    else:
        document = terraform_config(stack)
    print(json.dumps(document, indent=2))


def deploy_endpoint(
    settings: EndpointSettings,
    plan: "Plan",
    profile: str | None,
    wait: bool,
    upload_only: bool,
    quiet: bool,
) -> "list[StepResult]":
    from peagle.deploy.sagemaker.operate.apply import StackUpdate
    from peagle.deploy.sagemaker.operate.clients import Clients

    clients = Clients(settings.region, profile)
    assert clients.session  # fails without credentials, before anything is downloaded
    stack = upload_weights(settings, plan, clients, quiet)
    if upload_only:
        return []
    with spinner(quiet) as on_status:
        return StackUpdate(stack, clients, wait, on_status).apply()


def upload_weights(
    settings: EndpointSettings, plan: "Plan", clients: "Clients", quiet: bool
) -> "Stack":
    """Download and upload the weights; return the stack that reads them."""
    from peagle.deploy.sagemaker.operate.clients import translate_aws_errors
    from peagle.deploy.sagemaker.operate.upload import upload_files
    from peagle.deploy.sagemaker.plan.artifact import drafter_artifact, target_artifact
    from peagle.deploy.sagemaker.resources.stack import build_stack
    from peagle.progress import progress_bars

    fetch = not settings.from_hub
    with progress_bars(err, quiet=quiet) as progress:
        target = target_artifact(plan.pair, progress, fetch)
        drafter = drafter_artifact(plan, target, progress, fetch)
        stack = build_stack(settings, plan.deployment, target, drafter)
        with translate_aws_errors():
            for upload in stack.uploads:
                owner = settings.bucket_owner or clients.account
                upload_files(clients["s3"], upload, owner, progress)
    return stack


def report(
    settings: EndpointSettings,
    results: "list[StepResult]",
    upload_only: bool,
    as_json: bool,
    verify: bool,
    profile: str | None,
) -> None:
    """Print what was done; with `verify`, exit with 1 unless the endpoint speculates."""
    from peagle.deploy.sagemaker.operate.clients import Clients

    if not as_json:
        print_steps(settings, results, upload_only)
    verification = None
    if verify:
        verification = verify_sagemaker(Clients(settings.region, profile), settings.name, as_json)
    if as_json:
        print(json.dumps(report_json(settings, results, verification)))
    elif verification is not None:
        print_verification(verification)
    exit_unless_proven(verification)


def print_steps(settings: EndpointSettings, results: "list[StepResult]", upload_only: bool) -> None:
    for result in results:
        print(f"{result.outcome:9}  {result.kind} {result.name}")
    if upload_only:
        print(f"the weights are in {settings.bucket}")
        return
    if all(result.outcome == "unchanged" for result in results):
        print("nothing changed: the endpoint is up to date")
    print(f"next: peagle sagemaker status {settings.name} --verify --region {settings.region}")


def report_json(
    settings: EndpointSettings,
    results: "list[StepResult]",
    verification: "Verification | None",
) -> dict[str, Any]:
    from peagle.deploy.sagemaker.resources.stack import LOG_GROUP_PREFIX

    added = {"verification": verification.to_json()} if verification is not None else {}
    return {
        "endpoint": settings.name,
        "region": settings.region,
        "log_group": LOG_GROUP_PREFIX + settings.name,
        "steps": [
            {"kind": result.kind, "name": result.name, "what": result.outcome} for result in results
        ],
        **added,
    }
