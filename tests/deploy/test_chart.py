"""The chart, linted and rendered by Helm, and held against the schemas of Kubernetes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import redis
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject

from promptq.shared.server.acl import ROLES, user_rules
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.command import command
from tests.support.paths import ROOT
from tests.support.servers import OwnServer

CHART = ROOT / "deploy" / "chart"
VERSIONS = ("1.27", "1.33")
OTHERS = ("monitoring.coreos.com/v1", "keda.sh/v1alpha1")
"""APIs that are no part of Kubernetes."""
RESOURCES = {"requests": {"cpu": "1"}, "limits": {"memory": "40Gi"}}
LARGE = {
    "name": "large",
    "queue": "large",
    "model": "/models/large",
    "replicas": 3,
    "gpus": 1,
    "claim": "models",
    "args": ["--max-num-seqs=128"],
    "env": {"OMP_NUM_THREADS": 4},
    "image": {"repository": "promptq-cuda", "tag": "0.3.0"},
    "resources": RESOURCES,
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
}
VALUES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "two models": {
        "models": [LARGE, {**LARGE, "name": "small", "queue": "small", "gpus": 0, "claim": ""}]
    },
    "a server elsewhere": {
        "redis": {"external": {"url": "redis+cluster://a:7000,b:7000"}},
        "jobs": {"redisSecret": "rq"},
    },
    "a secret": {"redis": {"external": {"secret": "redis", "secretKey": "address"}}},
    "a secret with some roles": {
        "redis": {"external": {"secret": "redis", "secretKeys": {"worker": "of-workers"}}}
    },
    "workers alone": {"gateway": {"enabled": False}, "jobs": {"enabled": False}},
    "odd values": {
        "models": [
            {
                **LARGE,
                "name": "405",
                "queue": "true",
                "model": "/models/a #1",
                "resources": {"requests": {}, "limits": {"memory": "1Gi"}},
                "env": {"PROMPTQ_MAX_MODEL_LEN": 2097152, "PROMPTQ_TRUST_REMOTE_CODE": True},
            }
        ],
        "gateway": {"ingress": {"enabled": True, "host": "*.x.org"}},
    },
    "workers that follow the load": {
        "models": [
            {**LARGE, "scaling": {"enabled": True, "min": 0, "max": 8, "targetSeconds": 12.5}},
            {**LARGE, "name": "small", "queue": "small", "scaling": {"enabled": True}},
            {**LARGE, "name": "fixed", "queue": "fixed", "scaling": {"enabled": False}},
        ],
        "gateway": {"service": {"port": 8080}},
    },
    "models that take turns": {
        "models": [
            {
                **LARGE,
                "takesTurnsWith": [
                    {"queue": "b", "model": "/models/b"},
                    {"queue": "c", "model": "/models/c"},
                ],
                "scaling": {"enabled": True},
            },
            {**LARGE, "name": "small", "queue": "small"},
        ],
        "monitoring": {"podMonitor": True},
    },
    "everything": {
        "image": {"pullSecrets": ["mine"], "tag": "0.3.1", "digest": f"sha256:{'a' * 64}"},
        "redis": {"defaultUser": True},
        "drainSeconds": 120,
        "gateway": {
            "queues": ["default"],
            "ingress": {"enabled": True, "className": "nginx", "host": "x.org", "tlsSecret": "t"},
        },
        "files": {"storageClass": "nfs"},
        "monitoring": {"podMonitor": True},
        "networkPolicy": {"gatewayFrom": [{"namespaceSelector": {}}]},
    },
}
PATHS = {
    "startupProbe": "/startupz",
    "livenessProbe": "/livez",
    "readinessProbe": "/readyz",
}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"gatway": {}}, "gatway"),
    ({"models": [{**LARGE, "replicas": -1}]}, "replicas"),
    ({"models": [{**LARGE, "name": "Large Model"}]}, "name"),
    ({"models": [{**LARGE, "queue": "a b"}]}, "queue"),
    ({"redis": {"external": {"url": "http://a"}}}, "url"),
    ({"redis": {"external": {"secret": "a", "secretKeys": {"wroker": "b"}}}}, "wroker"),
    ({"redis": {"external": {"secretKeys": {"worker": "b"}}}}, "redis.external.secret, which"),
    ({"image": {"digest": "0.3.0"}}, "digest"),
    ({"models": [{**LARGE, "scaling": {"enabeld": True}}]}, "enabeld"),
    ({"models": [{**LARGE, "scaling": {"enabled": True, "min": 5}}]}, "large has scaling.max 4"),
    (
        {"models": [{**LARGE, "scaling": {"enabled": True}}], "gateway": {"enabled": False}},
        "set gateway.enabled",
    ),
    (
        {
            "models": [{**LARGE, "scaling": {"enabled": True}}],
            "gateway": {"queues": ["default"]},
        },
        "add large to gateway.queues",
    ),
    ({"models": [{**LARGE, "takesTurnsWith": [{"queue": "b"}]}]}, "model"),
    (
        {"models": [{**LARGE, "model": "", "takesTurnsWith": [{"queue": "b", "model": "b"}]}]},
        "large takes turns with others, so it needs its own model",
    ),
    (
        {
            "models": [
                {
                    **LARGE,
                    "takesTurnsWith": [{"queue": "b", "model": "b"}],
                    "scaling": {"enabled": True},
                }
            ],
            "gateway": {"queues": ["default", "large"]},
        },
        "add b to gateway.queues",
    ),
    ({"files": {"accessMode": "ReadOnlyMany"}}, "accessMode"),
]


def helm() -> Any:
    """Returns Helm's library. It is written in Go, whose runtime does not survive a fork, and the
    processes that run the tests are forks of one that has imported the tests."""
    import helm_python

    return helm_python


def rendered_files(values: dict[str, Any], **options: Any) -> dict[str, str]:
    with helm().Chart.load(CHART) as chart:
        chart.validate_schema(values)
        return dict(chart.render(values, name="it", namespace="models", **options))


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    files = rendered_files(values)
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [part for text in texts for part in yaml.load_all(text, yaml.CSafeLoader) if part]


def pods(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each object that has pods, and the specification of its pods."""
    for it in rendered(values):
        if it["kind"] in ("Deployment", "StatefulSet"):
            yield it, it["spec"]["template"]["spec"]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_helm_and_kubernetes_have_nothing_to_say_of_it(values: dict[str, Any]) -> None:
    told = helm().lint(str(CHART), values, strict=True)
    assert told["errors"] == []
    assert [it for it in told["messages"] if it["error"] != "icon is recommended"] == []
    for it in rendered(values):
        for version in VERSIONS:
            if it["apiVersion"] not in OTHERS:
                kubernetes_validate.validate(it, version, strict=True)


@pytest.mark.parametrize(("values", "named"), BAD, ids=[named for _, named in BAD])
def test_a_wrong_value_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm().HelmError, match=named):
        rendered(values)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_pods_may_do_little(values: dict[str, Any]) -> None:
    for of, pod in pods(values):
        assert pod["securityContext"]["runAsNonRoot"], of["metadata"]["name"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            allowed = container["securityContext"]
            assert allowed["readOnlyRootFilesystem"]
            assert allowed["allowPrivilegeEscalation"] is False
            assert allowed["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_each_selects_its_own_pods_and_nobody_elses(values: dict[str, Any]) -> None:
    objects = rendered(values)
    labels = {
        it["metadata"]["name"]: it["spec"]["template"]["metadata"]["labels"]
        for it in objects
        if it["kind"] in ("Deployment", "StatefulSet")
    }
    for it in objects:
        if it["kind"] == "Service":
            wanted = it["spec"]["selector"]
        elif it["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            wanted = it["spec"]["selector"]["matchLabels"]
        else:
            continue
        found = [name for name, has in labels.items() if wanted.items() <= has.items()]
        assert found == [it["metadata"]["name"]]
    names = [(it["kind"], it["metadata"]["name"]) for it in objects]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("drain", [20, 300])
def test_a_pod_has_longer_to_end_than_its_worker_takes_to_drain(drain: int) -> None:
    for of, pod in pods({"drainSeconds": drain}):
        if of["metadata"]["labels"].get("app.kubernetes.io/component") == "worker":
            assert f"--drain-seconds={drain}" in pod["containers"][0]["args"]
            assert pod["terminationGracePeriodSeconds"] > drain + 30


def test_the_commands_know_their_arguments() -> None:
    known = {option for parameter in command().params for option in parameter.opts}
    for of, pod in pods(VALUES["two models"]):
        if "-worker-" in of["metadata"]["name"]:
            name, *options = pod["containers"][0]["args"]
            assert name == "worker"
            assert {option.partition("=")[0] for option in options} <= known
            environment = {it["name"] for it in pod["containers"][0]["env"]}
            of_ours = {it for it in environment if it.startswith("PROMPTQ_")}
            assert of_ours <= {f"PROMPTQ_{name.upper()}" for name in WorkerSettings.model_fields}


def test_keda_scales_workers_by_what_the_gateway_says() -> None:
    """Its own models know each key, and nobody else sets the number of those workers."""
    objects = rendered(VALUES["workers that follow the load"])
    scaled = {it["metadata"]["name"]: it["spec"] for it in objects if "keda" in it["apiVersion"]}
    for it in objects:
        if "keda" in it["apiVersion"]:
            ScaledObject.model_validate(it, extra="forbid")
        if it["kind"] == "Deployment" and "-worker-" in it["metadata"]["name"]:
            assert ("replicas" in it["spec"]) != (it["metadata"]["name"] in scaled)
    assert [it["minReplicaCount"] for it in scaled.values()] == [0, 1]
    assert [it["maxReplicaCount"] for it in scaled.values()] == [8, 4]
    asked = [it["triggers"][0]["metadata"] for it in scaled.values()]
    host = "http://it-gateway.models.svc:8080"
    assert asked[0]["url"] == f"{host}/scaling?queue=large&target_seconds=12.5"
    assert {it["valueLocation"] for it in asked} == {"queues.0.desired"}


def test_models_that_take_turns_have_one_worker_and_a_queue_each() -> None:
    values = VALUES["models that take turns"]
    [worker, _] = [it for of, it in pods(values) if "-worker-" in of["metadata"]["name"]]
    container = worker["containers"][0]
    served = [it for it in container["args"] if it.startswith(("--queue", "--model"))]
    assert served == [
        *("--queue=large", "--model=/models/large"),
        *("--queue=b", "--model=/models/b", "--queue=c", "--model=/models/c"),
    ]
    ports = {it["name"]: it["containerPort"] for it in container["ports"]}
    objects = rendered(values)
    [scaled] = [it["spec"] for it in objects if it["kind"] == "ScaledObject"]
    asked = [it["metadata"]["url"].partition("?")[2] for it in scaled["triggers"]]
    assert asked == [f"queue={queue}&target_seconds=30" for queue in ("large", "b", "c")]
    [monitor] = [it["spec"] for it in objects if it["kind"] == "PodMonitor"]
    *watched, of_gateway = (it["port"] for it in monitor["podMetricsEndpoints"])
    assert [ports[name] for name in watched] == [9100, 9101, 9102]
    assert of_gateway == "http"
    [opened] = [
        it["spec"]["ingress"][0]["ports"]
        for it in objects
        if it["kind"] == "NetworkPolicy" and it["metadata"]["name"] == "it-workers"
    ]
    assert [(it["port"], it["endPort"]) for it in opened] == [(9100, 9199)]


def test_odd_values_come_through_as_they_are() -> None:
    [worker] = [it for of, it in pods(VALUES["odd values"]) if "-405" in of["metadata"]["name"]]
    container = worker["containers"][0]
    assert {"--queue=true", "--model=/models/a #1"} <= set(container["args"])
    told = {it["name"]: it.get("value") for it in container["env"]}
    assert told["PROMPTQ_MAX_MODEL_LEN"] == "2097152"
    assert told["PROMPTQ_TRUST_REMOTE_CODE"] == "true"
    assert container["resources"]["limits"] == {"memory": "1Gi", "nvidia.com/gpu": 1}


def test_each_queue_has_jobs() -> None:
    def queues(values: dict[str, Any]) -> list[str]:
        return [
            it["value"]
            for of, pod in pods(values)
            if "-jobs-" in of["metadata"]["name"]
            for it in pod["containers"][0]["env"]
            if it["name"] == "PROMPTQ_QUEUE"
        ]

    assert queues({}) == ["default"]
    assert queues(VALUES["two models"]) == ["default", "large", "small"]
    taking_turns = queues(VALUES["models that take turns"])
    assert taking_turns == ["default", "large", "b", "c", "small"]
    assert queues({"jobs": {"queues": ["one"]}}) == ["one"]


def test_jobs_on_a_cluster_need_a_separate_server() -> None:
    values = {"redis": {"external": {"url": "redis+cluster://a:7000"}}}
    with pytest.raises(helm().HelmError, match="RQ needs a server without Cluster"):
        rendered(values)
    assert rendered({**values, "jobs": {"enabled": False}})
    assert rendered({"redis": {"external": {"url": "redis+sentinel://a:26379/promptq/0"}}})


def test_a_worker_is_probed_where_it_answers_and_a_gateway_is_ready_without_workers() -> None:
    for of, pod in pods({}):
        container = pod["containers"][0]
        if "-worker-" in of["metadata"]["name"]:
            ports = {it["name"]: it["containerPort"] for it in container["ports"]}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                asked = container[probe]["httpGet"]
                assert asked["path"] == PATHS[probe]
                assert f"--health-port={ports[asked['port']]}" in container["args"]
        if of["metadata"]["name"].endswith("gateway"):
            assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"


def secret_keys(values: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The secret and its key from which each component gets its URL."""
    found = {}
    for of, pod in pods(values):
        for variable in pod["containers"][0]["env"]:
            if variable["name"] == "PROMPTQ_REDIS_URL":
                chosen = variable["valueFrom"]["secretKeyRef"]
                component = of["metadata"]["labels"]["app.kubernetes.io/component"]
                found[component] = (chosen["name"], chosen["key"])
    return found


def test_each_process_is_a_user_of_its_role_on_the_charts_server(tmp_path: Path) -> None:
    objects = rendered({})
    [secret] = [it for it in objects if it["kind"] == "Secret"]
    data = secret["stringData"]
    assert len(data["password"]) == 40
    for value in data.values():
        assert value not in json.dumps([it for it in objects if it is not secret])
    [again] = [it for it in rendered({}) if it["kind"] == "Secret"]
    assert again["stringData"]["password"] != data["password"]  # each release has its own
    used = {role: ("it-redis", role) for role in ("worker", "gateway", "jobs")}
    assert secret_keys({}) == used
    urls = {role: urlsplit(data[role]) for role in ROLES}
    passwords = {role: str(url.password) for role, url in urls.items()}
    assert len({data["password"], *passwords.values()}) == len(ROLES) + 1
    lines = data["users.acl"].splitlines()
    assert lines[:2] == ["user default off", f"user admin on >{data['password']} ~* &* +@all"]
    rules = {role: user_rules(role, "*", passwords[role]) for role in ROLES}
    assert lines[2:] == [" ".join(["user", role, *rules[role]]) for role in ROLES]
    (tmp_path / "users.acl").write_text(data["users.acl"])
    admin = {"username": "admin", "password": data["password"]}
    options = ("--aclfile", str(tmp_path / "users.acl"))
    with OwnServer(tmp_path / "server", *options, connect=admin) as server:
        for role, url in urls.items():
            assert (url.username, url.hostname, url.port) == (role, "it-redis", 6379)
            own = f"redis://{role}:{url.password}@127.0.0.1:{server.port}"
            with redis.Redis.from_url(own) as client:
                assert client.ping()


def test_an_upgrade_can_keep_the_user_of_earlier_charts(tmp_path: Path) -> None:
    objects = rendered({"redis": {"defaultUser": True}})
    [data] = [it["stringData"] for it in objects if it["kind"] == "Secret"]
    (tmp_path / "users.acl").write_text(data["users.acl"])
    options = ("--aclfile", str(tmp_path / "users.acl"))
    connect = {"password": data["password"]}
    assert data["url"] == f"redis://:{data['password']}@it-redis:6379/0"
    with OwnServer(tmp_path / "server", *options, connect=connect) as server:
        assert server.client().execute_command("ACL", "WHOAMI") == b"default"


def test_the_notes_name_the_users_and_the_command() -> None:
    def notes(values: dict[str, Any], **options: Any) -> str:
        return rendered_files(values, **options)["promptq/templates/NOTES.txt"]

    assert "it-redis --output jsonpath='{.data.operator}'" in notes({})
    turned_off = "has turned off the user without a name"
    assert turned_off not in notes({})
    assert turned_off in notes({}, is_upgrade=True)
    kept = notes({"redis": {"defaultUser": True}}, is_upgrade=True)
    assert "WARNING: redis.defaultUser is true" in kept
    assert turned_off not in kept
    for name in ("a server elsewhere", "a secret", "a secret with some roles"):
        assert "WARNING: processes share one user" in notes(VALUES[name])
    keys = {role: role for role in ("worker", "gateway", "jobs")}
    assert notes({"redis": {"external": {"secret": "redis", "secretKeys": keys}}}).strip() == ""


def test_a_secret_may_have_a_url_for_each_role() -> None:
    assert secret_keys(VALUES["a secret"]) == dict.fromkeys(
        ("worker", "gateway", "jobs"), ("redis", "address")
    )
    expected = {"worker": ("redis", "of-workers"), "gateway": ("redis", "url")}
    assert secret_keys(VALUES["a secret with some roles"]) == {**expected, "jobs": ("redis", "url")}


def test_a_digest_is_of_one_image() -> None:
    """Workers with an image of their own do not get that of the others."""
    digests = [f"sha256:{letter * 64}" for letter in "ab"]
    models = [
        {**LARGE, "name": "one", "image": {}},
        {**LARGE, "name": "two", "image": {"repository": "cuda", "tag": "1"}},
        {**LARGE, "name": "three", "image": {"repository": "cuda", "digest": digests[1]}},
    ]
    values = {"image": {"digest": digests[0]}, "models": models}
    images = {of["metadata"]["name"]: pod["containers"][0]["image"] for of, pod in pods(values)}
    assert images["it-gateway"] == images["it-worker-one"] == f"promptq:0.3.0@{digests[0]}"
    assert images["it-worker-two"] == "cuda:1"
    assert images["it-worker-three"] == f"cuda:0.3.0@{digests[1]}"


def test_a_server_that_there_is_takes_the_place_of_ours() -> None:
    for values in (VALUES["a server elsewhere"], VALUES["a secret"]):
        kinds = [it["kind"] for it in rendered(values)]
        assert "StatefulSet" not in kinds
        assert kinds.count("Secret") == ("secret" not in values["redis"]["external"])
