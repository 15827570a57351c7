"""`peagle deploy`: every file is valid for the parser of its format, and the files agree.

Ray, SkyPilot and KServe are validated in tests/deploy_validators (`make test-deploy`), vLLM's
arguments in tests/vllm.
"""

import ipaddress
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import ComposeSpecification, PyCompose

from peagle.deploy.render import next_steps
from peagle.server.http.app import add_routes
from tests.support.deploy.deploying import (
    KEYS,
    KINDS,
    PAIRS,
    container_spec,
    documents,
    planned,
    rendered,
    speculative_config,
    vllm_arguments,
)
from tests.support.server.serving import make_backend

LOCAL = {
    "drafter": str(Path(__file__).parents[2] / "peagle" / "drafters" / "smollm2-135m" / "p-eagle")
}
BIG = {"gpus": 2, "replicas": 3, "port": 9000, "gpu": "H100"}
KUBERNETES = "1.32"


def kinds(*without: str) -> Any:
    return pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in without])


@kinds()
@pytest.mark.parametrize("pair", PAIRS)
def test_every_speculative_config_has_all_keys(kind: str, pair: str) -> None:
    deployment = planned(kind, pair, gpu="H100")
    config = speculative_config(kind, rendered(kind, pair, gpu="H100"))
    assert set(config) == KEYS and config["method"] == "eagle3"
    assert config["num_speculative_tokens"] == deployment.k and config["parallel_drafting"] is (
        deployment.method == "p-eagle"
    )
    assert config["model"] == (
        "./drafter" if kind == "vllm" and deployment.local_drafter else deployment.drafter
    )


@kinds()
def test_no_secret_is_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "VLLM_API_KEY", "PEAGLE_API_KEY"):
        monkeypatch.setenv(name, "very-secret")
    files = rendered(kind)
    assert not any("very-secret" in text for text in files.values())
    assert "--api-key" not in " ".join(files.values()), (
        "arguments are visible to every user of the machine"
    )
    for text in files.values():
        for line in text.splitlines():
            if match := re.match(r"\s*(?:- )?(?:HF_TOKEN|VLLM_API_KEY)\s*[:=]\s*(.*)", line):
                assert match[1].split("#")[0].strip() in ("", "null") or match[1].startswith(
                    "${"
                ), line


@kinds()
def test_rendering_is_deterministic(kind: str) -> None:
    assert rendered(kind, **BIG) == rendered(kind, **BIG)


@kinds("ray")
def test_ports_agree_and_probes_use_existing_paths(kind: str) -> None:
    files = rendered(kind, port=9000, gpu="H100")
    text = "\n".join(files.values())
    served = set(re.findall(r"(?:port|Port|PORT):?[-= ]+\"?(\d{4,5})\b|:(\d{4,5})[/:\"' ]", text))
    ports = {number for pair in served for number in pair if number} - {
        "9090"
    }  # the port of Prometheus
    assert ports == {"9000"}
    paths = set(re.findall(r"path: (/\S+)|:9000(/\w+)", text))
    probed = {path for pair in paths for path in pair if path} - {"/models"}
    expected = {
        "vllm": {"/metrics"},
        "helm": {"/health"},
        "skypilot": {"/health"},
    }  # Other components scrape metrics or check health.
    assert probed == expected.get(kind, {"/health", "/metrics"}) and probed <= routes()


def routes() -> set[str]:
    """The routes of `peagle serve`, which equal those of vLLM (checked in tests/vllm)."""
    from fastapi import FastAPI

    from peagle.server.http.limits import BodyBudget

    app = FastAPI()
    add_routes(app, make_backend().route_handlers, BodyBudget(1))
    return {route.path for route in app.routes}


@kinds("vllm", "ray")
def test_the_image_has_the_requested_vllm_version(kind: str) -> None:
    text = "\n".join(rendered(kind, vllm="0.27.1").values())
    if kind == "helm":
        model = documents(rendered(kind, vllm="0.27.1"))["values.yaml"]["servingEngineSpec"][
            "modelSpec"
        ][0]
        text = f"{model['repository']}:{model['tag']}"
    assert "vllm/vllm-openai:v0.27.1" in text


def test_the_script_passes_shellcheck(tmp_path: Path) -> None:
    for number, options in enumerate(({}, BIG, LOCAL | {"pair": "smollm2-135m"})):
        script = tmp_path / f"{number}.sh"
        script.write_text(rendered("vllm", **options)["serve.sh"])
        subprocess.run(["bash", "-n", script], check=True)
        subprocess.run([Path(sys.executable).parent / "shellcheck", script], check=True)


@kinds()
def test_the_next_steps_are_valid_shell(kind: str) -> None:
    for options in (BIG, LOCAL | {"pair": "smollm2-135m"}):
        steps = next_steps(kind, planned(kind, **options), Path("out here"))
        subprocess.run(["bash", "-n"], input=steps, text=True, check=True)
        assert "'out here" in steps


def test_the_script_starts_vllm(tmp_path: Path) -> None:
    """A fake `vllm` program prints its arguments."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").write_text(
        '#!/bin/sh\nfor word; do echo "$word"; done\npwd\necho "$VLLM_USE_V2_MODEL_RUNNER"\n'
    )
    (tmp_path / "bin" / "vllm").chmod(0o755)
    files = rendered("vllm", served_model_name="it's")
    (tmp_path / "serve.sh").write_text(files["serve.sh"])

    def start(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"} | variables
        return subprocess.run(
            ["bash", tmp_path / "serve.sh"], env=environment, capture_output=True, text=True
        )

    *words, folder, runner = start().stdout.splitlines()
    assert (
        words == ["serve", *vllm_arguments("vllm", files)] and "--served-model-name=it's" in words
    )
    assert (folder, runner) == (str(tmp_path), "0")
    refused = start(HOST="0.0.0.0")
    assert refused.returncode == 2 and "set VLLM_API_KEY" in refused.stderr
    assert "0.0.0.0" in start(HOST="0.0.0.0", VLLM_API_KEY="k").stdout


def test_the_config_file_equals_the_arguments_of_the_script() -> None:
    files = rendered("vllm", **(BIG | {"port": 8000}))
    config = documents(files)["config.yaml"]
    words = [
        f"--{key}={value}" for key, value in config.items() if key not in ("model", "host", "port")
    ]
    assert [
        config["model"],
        "--host",
        config["host"],
        "--port",
        str(config["port"]),
        *words,
    ] == vllm_arguments("vllm", files)


@pytest.mark.parametrize(
    "options", [{}, BIG, LOCAL | {"pair": "smollm2-135m"}], ids=["hub", "big", "local"]
)
def test_compose(options: dict[str, Any]) -> None:
    files = rendered("compose", **options)
    parsed = documents(files)["compose.yaml"]
    compose_model(parsed)
    deployment = planned("compose", **options)
    servers = {
        name: service for name, service in parsed["services"].items() if name != "prometheus"
    }
    assert len(servers) == deployment.replicas
    ids = [device for s in servers.values() for device in devices(s)]
    assert ids == [str(i) for i in range(deployment.replicas * deployment.gpus)], "no GPU is shared"
    published = [service["ports"][0] for service in servers.values()]
    assert published == [
        f"127.0.0.1:{deployment.port + i}:{deployment.port}" for i in range(deployment.replicas)
    ]
    scraped = documents(files)["prometheus.yml"]["scrape_configs"][0]["static_configs"][0][
        "targets"
    ]
    assert scraped == [f"{name}:{deployment.port}" for name in servers]
    mounts = next(iter(servers.values()))["volumes"]
    assert (f"./drafter:{deployment.drafter}:ro" in mounts) is deployment.local_drafter


def compose_model(parsed: dict[str, Any]) -> None:
    ComposeSpecification.model_validate(parsed)
    PyCompose.from_yaml(yaml.safe_dump(parsed)).validate()  # accepts only keys of the specification


def devices(service: dict[str, Any]) -> list[str]:
    return service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]


@pytest.mark.parametrize("key", ["imag", "health_check", "replicas"])
def test_the_compose_model_is_strict(key: str) -> None:
    parsed = documents(rendered("compose"))["compose.yaml"]
    next(iter(parsed["services"].values()))[key] = "x"
    with pytest.raises(Exception, match=key):
        compose_model(parsed)


def test_dollar_signs_are_escaped_for_compose() -> None:
    parsed = documents(rendered("compose", served_model_name="a$b"))["compose.yaml"]
    assert "--served-model-name=a$$b" in next(iter(parsed["services"].values()))["command"]


@pytest.mark.parametrize(
    "options", [{}, BIG, LOCAL | {"pair": "smollm2-135m"}], ids=["hub", "big", "local"]
)
def test_kubernetes_files(options: dict[str, Any]) -> None:
    parsed = documents(rendered("kubernetes", **options))
    deployment = planned("kubernetes", **options)
    names = ["deployment", "service", "storage", "networkpolicy"]
    for name in [*names, "loader"] if deployment.local else names:
        kubernetes_validate.validate(parsed[f"{name}.yaml"], KUBERNETES, strict=True)
    assert ("loader.yaml" in parsed) is deployment.local
    assert set(parsed["kustomization.yaml"]["resources"]) <= set(parsed)
    pod = parsed["deployment.yaml"]["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    assert parsed["service.yaml"]["spec"]["selector"].items() <= labels
    assert parsed["deployment.yaml"]["spec"]["selector"]["matchLabels"].items() <= labels
    assert parsed["podmonitor.yaml"]["spec"]["selector"]["matchLabels"].items() <= labels
    assert parsed["networkpolicy.yaml"]["spec"]["podSelector"]["matchLabels"].items() <= labels
    assert (
        not parsed["service.yaml"]["metadata"]["name"].startswith("vllm")
        and pod["spec"]["enableServiceLinks"] is False
    )
    assert parsed["storage.yaml"]["spec"]["accessModes"] == (
        ["ReadWriteMany"] if deployment.replicas > 1 else ["ReadWriteOnce"]
    )
    assert pod["spec"].get("nodeSelector", {}).get("nvidia.com/gpu.product") == deployment.gpu


def test_the_kubernetes_schema_is_strict() -> None:
    parsed = documents(rendered("kubernetes"))["deployment.yaml"]
    parsed["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePolicy"):
        kubernetes_validate.validate(parsed, KUBERNETES, strict=True)


@pytest.mark.parametrize("kind", ["kubernetes", "kserve"])
def test_references_of_a_pod_exist(kind: str) -> None:
    """Volumes, ports, secrets and probes of the container refer to existing objects."""
    parsed = documents(rendered(kind, **BIG))
    deployment = planned(kind, **BIG)
    spec = parsed["inferenceservice.yaml"]["spec"]["predictor"] if kind == "kserve" else None
    spec = spec or parsed["deployment.yaml"]["spec"]["template"]["spec"]
    container = container_spec(kind, parsed)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert (
        volumes["models"]["persistentVolumeClaim"]["claimName"]
        == parsed["storage.yaml"]["metadata"]["name"]
    )
    env = {variable["name"]: variable for variable in container["env"]}
    for name, key in (("VLLM_API_KEY", "api-key"), ("HF_TOKEN", "hf-token")):
        reference = env[name]["valueFrom"]["secretKeyRef"]
        assert (reference["name"], reference["key"]) == (
            deployment.name,
            key,
        ) and "value" not in env[name]
    assert env["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"].get("optional") is None
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {
            "path": "/health",
            "port": container["ports"][0]["containerPort"],
        }
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(deployment.gpus)
    assert container["image"] == deployment.image


@pytest.mark.parametrize("kind", ["kubernetes", "kserve", "helm"])
@pytest.mark.parametrize("options", [{}, LOCAL | {"pair": "smollm2-135m"}], ids=["hub", "local"])
def test_pods_have_security_contexts_and_limits(kind: str, options: dict[str, Any]) -> None:
    """Containers run without root and capabilities, with a seccomp profile and a memory limit."""
    parsed = documents(rendered(kind, **options))
    deployment = planned(kind, **options)
    pods = pod_specs(kind, parsed)
    if deployment.local:
        pods.append((parsed["loader.yaml"]["spec"], *parsed["loader.yaml"]["spec"]["containers"]))
    for pod, container in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        resources = container["resources"]
        requested, limit = (int(resources[x]["memory"][:-2]) for x in ("requests", "limits"))
        assert limit > requested
    server = pods[0][1]
    assert int(server["resources"]["limits"]["memory"][:-2]) > deployment.host_gb + 8, (
        "the limit includes shared memory"
    )
    variables = {entry["name"]: entry.get("value") for entry in server["env"]}
    assert variables["USER"] == variables["LOGNAME"] == "vllm", (
        "without these variables, torch looks up the user name, which does not exist"
    )
    assert variables["HOME"] == ("/tmp" if kind == "helm" else "/home/vllm")


def pod_specs(kind: str, parsed: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Pairs of the server's pod spec and container spec."""
    if kind != "helm":
        spec = parsed["inferenceservice.yaml"]["spec"]["predictor"] if kind == "kserve" else None
        spec = spec or parsed["deployment.yaml"]["spec"]["template"]["spec"]
        return [(spec, spec["containers"][0])]
    engine = parsed["values.yaml"]["servingEngineSpec"]
    model = engine["modelSpec"][0]
    resources = {
        "requests": {"memory": model["requestMemory"]},
        "limits": {"memory": model["limitMemory"]},
    }
    container = {
        "securityContext": engine["containerSecurityContext"],
        "resources": resources,
        "env": model["env"],
    }
    return [(engine, container)]


@pytest.mark.parametrize("kind", ["kubernetes", "kserve", "helm"])
def test_network_policies(kind: str) -> None:
    policy = documents(rendered(kind, port=9000))["networkpolicy.yaml"]
    kubernetes_validate.validate(policy, KUBERNETES, strict=True)
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert [rule["ports"] for rule in policy["spec"]["ingress"]] == [
        [{"protocol": "TCP", "port": 9000}]
    ]
    egress = policy["spec"]["egress"]
    assert {port["port"] for rule in egress for port in rule["ports"]} == {53, 443}
    hub = next(rule for rule in egress if rule["ports"][0]["port"] == 443)
    metadata_service = ipaddress.ip_address("169.254.169.254")
    excluded = hub["to"][0]["ipBlock"]["except"]
    assert any(metadata_service in ipaddress.ip_network(network) for network in excluded)
    assert "networkpolicy.yaml" in next_steps(kind, planned(kind), Path("out")) or (
        kind == "kubernetes"  # through kustomization.yaml
    )


# Fields of the chart, from its values.schema.json of autumn 2026: name -> type, or inner fields.
PROBE = {
    "initialDelaySeconds": int,
    "periodSeconds": int,
    "failureThreshold": int,
    "httpGet": {"path": str, "port": int},
}
SECRET = {"secretName": str, "secretKey": str}
ENGINE = {
    "enablePrefixCaching": bool,
    "tensorParallelSize": int,
    "maxModelLen": int,
    "extraArgs": [str],
}
CHART: dict[str, Any] = {
    "servingEngineSpec": {
        "enableEngine": bool,
        "runtimeClassName": str,
        "containerPort": int,
        "servicePort": int,
        "vllmApiKey": SECRET,
        "securityContext": dict,
        "containerSecurityContext": dict,
        "startupProbe": PROBE,
        "readinessProbe": PROBE,
        "livenessProbe": PROBE,
        "serviceMonitor": {"enabled": bool, "interval": str, "scrapeTimeout": str},
        "modelSpec": [
            {
                "name": str,
                "repository": str,
                "tag": str,
                "modelURL": str,
                "replicaCount": int,
                "requestCPU": int,
                "requestMemory": str,
                "limitMemory": str,
                "requestGPU": int,
                "pvcStorage": str,
                "pvcAccessMode": [str],
                "shmSize": str,
                "hf_token": SECRET,
                "env": [dict],
                "extraVolumes": [dict],
                "extraVolumeMounts": [dict],
                "nodeSelectorTerms": [dict],
                "vllmConfig": ENGINE,
            }
        ],
    },
    "routerSpec": {
        "enableRouter": bool,
        "replicaCount": int,
        "routingLogic": str,
        "servicePort": int,
    },
}


def check_values(values: Any, schema: Any, where: str = "values") -> None:
    if isinstance(schema, dict):
        assert isinstance(values, dict) and set(values) <= set(schema), (where, values)
        for key, value in values.items():
            check_values(value, schema[key], f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(values, list), where
        for value in values:
            check_values(value, schema[0], where)
    else:
        assert type(values) is schema, (where, values)


@pytest.mark.parametrize(
    "options", [{}, BIG, LOCAL | {"pair": "smollm2-135m"}], ids=["hub", "big", "local"]
)
def test_helm(options: dict[str, Any]) -> None:
    parsed = documents(rendered("helm", **options))
    deployment = planned("helm", **options)
    values = parsed["values.yaml"]
    check_values(values, CHART)
    engine = values["servingEngineSpec"]
    assert engine["vllmApiKey"] == {"secretName": deployment.name, "secretKey": "api-key"}
    model = engine["modelSpec"][0]
    longest = "p" * 40  # the chart builds a host name from the release name
    assert len(f"{longest}-{model['name']}-engine-service") <= 63
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["httpGet"]["port"] == engine["containerPort"]
    assert all(set(variable) == {"name", "value"} for variable in model["env"])
    if deployment.local:
        claim = model["extraVolumes"][0]["persistentVolumeClaim"]["claimName"]
        assert claim == parsed["storage.yaml"]["metadata"]["name"]
        kubernetes_validate.validate(parsed["loader.yaml"], KUBERNETES, strict=True)


def test_ray_and_skypilot_mount_a_local_drafter() -> None:
    files = documents(rendered("skypilot", "smollm2-135m", **LOCAL))
    assert files["service.yaml"]["file_mounts"] == {"/models/drafter": "./drafter"}
    assert files["service.yaml"]["secrets"] == {"VLLM_API_KEY": None, "HF_TOKEN": None}
    assert files["service.yaml"]["service"]["readiness_probe"]["path"] in routes()
    config = speculative_config("ray", rendered("ray", "smollm2-135m", **LOCAL))
    assert config["model"] == "/models/drafter"


def test_flags_of_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_CONFIG", str(tmp_path))
    (tmp_path / "pairs").mkdir()
    flags = (
        '{ dtype = "half", no-enable-prefix-caching = true, max-num-seqs = 8,'
        " compilation-config = { level = 1 } }"
    )
    entry = (
        f'[target]\nhub = "a/b"\n[drafters.p-eagle]\nhub = "c/d"\n[production]\nflags = {flags}\n'
    )
    (tmp_path / "pairs" / "mine.toml").write_text(entry)
    expected = [
        "--dtype=half",
        "--no-enable-prefix-caching",
        "--max-num-seqs=8",
        '--compilation-config={"level": 1}',
    ]
    for kind in KINDS:
        files = rendered(kind, "mine", gpu="H100")
        if kind != "ray":
            assert [word for word in vllm_arguments(kind, files) if word in expected] == expected, (
                kind
            )
    config = documents(rendered("vllm", "mine"))["config.yaml"]
    assert (
        config["no-enable-prefix-caching"] is True
        and config["compilation-config"] == '{"level": 1}'
    )
    args = documents(rendered("ray", "mine"))["serve.yaml"]["applications"][0]["args"][
        "llm_configs"
    ][0]
    kwargs = args["engine_kwargs"]
    assert (kwargs["dtype"], kwargs["enable_prefix_caching"]) == ("half", False)
    assert kwargs["compilation_config"] == {"level": 1} and kwargs["max_num_seqs"] == 8
