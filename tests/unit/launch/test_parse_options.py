"""Options of the launchers: values, mistakes, and the error of each."""

import pytest

from rlscale.launch.options import SkyPilotOptions, SlurmOptions
from rlscale.launch.parse_options import OPTIONS, option_schemas, parse_launch_arguments, value_schema

REQUIRED = {"slurm": (), "kuberay": ("--image", "x", "--claim", "c"), "skypilot": ()}


def errors(launcher: str, *argv: str) -> list[str]:
    return [str(problem) for problem in parse_launch_arguments(launcher, [*REQUIRED[launcher], *argv]).problems]


def test_options_flags_and_overrides_are_told_apart() -> None:
    given = parse_launch_arguments(
        "slurm",
        ["--time=1-00:00:00", "algo=gspo", "--env", "A", "--env=B_1", "--cpus", "4", "--lr", "3e-4", "--submit"],
    )
    assert given.problems == []
    assert given.options == SlurmOptions(time="1-00:00:00", env=["A", "B_1"], cpus=4)
    assert given.remaining == ["algo=gspo", "--lr", "3e-4"]
    assert (given.submit, given.stdout, given.output) == (True, False, None)


def test_a_switch_takes_no_value() -> None:
    given = parse_launch_arguments("skypilot", ["--spot", "algo=gspo", "--output", "x.yaml"])
    assert given.options == SkyPilotOptions(spot=True)
    assert (given.remaining, given.output) == (["algo=gspo"], "x.yaml")


@pytest.mark.parametrize(
    ("launcher", "argv", "error"),
    [
        (
            "slurm",
            ["--partiton", "gpu"],
            "be a known option, got --partiton; did you mean --partition?",
        ),
        ("slurm", ["--time", "tomorrow"], "[days-]hours:minutes:seconds, got tomorrow; write e.g. --time 24:00:00"),
        ("slurm", ["--cpus", "0"], "--cpus must be an integer, at least 1, got 0; remove --cpus to use the default"),
        ("slurm", ["--cpus"], "--cpus must have a value, got nothing; write --cpus <value>"),
        ("slurm", ["--cpus", "--submit"], "--cpus must have a value, got nothing"),
        ("slurm", ["--spot"], "--spot must be an option of slurm, got --spot; it is an option of skypilot"),
        ("slurm", ["--setup", "a\nb"], "--setup must be one line of shell commands"),
        ("slurm", ["--workdir", "here"], "--workdir must be an absolute path"),
        ("slurm", ["--workdir", '/a"; rm -rf /'], "--workdir must be an absolute path"),
        ("slurm", ["--partition", "a b"], "--partition must have letters"),
        ("slurm", ["--image", "experiment=quickstart"], "--image must name an image, got experiment=quickstart"),
        ("kuberay", ["--queue", "a" * 64], "--queue must have at most 63 lower-case letters"),
        ("kuberay", ["--node-selector", "gpu"], "--node-selector must be a label of Kubernetes, written as label=val"),
        ("kuberay", ["--node-selector", "gpu=a/b"], "--node-selector must be a label of Kubernetes"),
        ("kuberay", ["--node-selector", "a/b/c=d"], "--node-selector must be a label of Kubernetes"),
        ("kuberay", ["--claim", "Big_One"], "--claim must have at most 253 lower-case letters"),
        ("kuberay", ["--name", "a" * 48], "--name must have at most 47 lower-case letters"),
        ("kuberay", ["--retries", "-1"], "--retries must be an integer, at least 0, got -1"),
        ("skypilot", ["--bucket", "mine"], "--bucket must be the URL of a bucket, got mine; write e.g. --bucket s3://"),
    ],
)
def test_a_wrong_option_is_one_error(launcher: str, argv: list[str], error: str) -> None:
    found = errors(launcher, *argv)
    assert len(found) == 1 and error in found[0], found


@pytest.mark.parametrize("flag", ["--claim", "--secret", "--token-secret", "--service-account"])
def test_objects_of_kubernetes_have_longer_names_than_a_job(flag: str) -> None:
    name = "wandb.keys-of-the-whole-team-0123456789-0123456789-0123456789"
    given = parse_launch_arguments("kuberay", ["--image", "x", "--claim", "c", flag, name])
    assert given.problems == []


@pytest.mark.parametrize(("name", "is_valid"), [("a" * 63, True), ("a" * 64, False), ("a.b", False)])
def test_a_namespace_is_a_label(name: str, is_valid: bool) -> None:
    given = parse_launch_arguments("kuberay", ["--image", "x", "--claim", "c", "--namespace", name])
    assert (given.problems == []) == is_valid


def test_all_mistakes_are_reported_together() -> None:
    given = parse_launch_arguments("kuberay", ["--retries", "x", "--quue", "q"])
    assert sorted(problem.path for problem in given.problems) == ["--claim", "--image", "--quue", "--retries"]
    assert given.options is None
    assert "add --image registry.example.com/rlscale:cuda" in [problem.fix for problem in given.problems]


def test_the_value_of_a_variable_is_not_repeated() -> None:
    (error,) = errors("slurm", "--env", "WANDB_API_KEY=s3cret")
    assert "s3cret" not in error and "never its value" in error


@pytest.mark.parametrize("launcher", OPTIONS)
def test_every_option_has_a_help_text_and_every_example_is_valid(launcher: str) -> None:
    schemas = option_schemas(launcher)
    examples = {name: value_schema(schema).get("examples", ()) for name, schema in schemas.items()}
    assert sum(map(len, examples.values())) >= 10
    for name, schema in schemas.items():
        assert schema.get("description"), name
        for example in examples[name]:
            flag = f"--{name.replace('_', '-')}"
            assert errors(launcher, flag, example) == []
