"""The command `rlscale-convert`: converts weights from Hugging Face to Megatron-core format and back."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlscale.architectures.hf_config import read_config_json
from rlscale.architectures.megatron_fields import MegatronKeys, check_architecture
from rlscale.cli.long_paths import reports_long_paths
from rlscale.cli.option_parser import DefaultsFormatter, OptionParser
from rlscale.errors import ConfigError, DataError, Problem
from rlscale.models.megatron_folder import torch_dist_folder
from rlscale.models.model_path import check_model_path, error_of_argument

log = logging.getLogger("rlscale.convert")

DONE, WRONG_INPUT = 0, 2
MODES = ("raw", "bridge")
DTYPES = ("float32", "bfloat16", "float16")
_OF_RUNS = " with train.backend=megatron"


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="rlscale-convert",
        description="Converts weights from Hugging Face to Megatron-core format or back, depending on SOURCE. "
        "SOURCE may be a checkpoint of a Megatron trainer. Converting there and back gives the same bytes.",
        epilog="For a model that is too large for one process start several: torchrun --nproc-per-node 4 -m "
        "rlscale.cli.convert SOURCE TARGET --tensor-parallel 4. The result can be loaded with any parallel sizes. "
        "exit code: 0 done, 2 the input is wrong",
        formatter_class=DefaultsFormatter,
    )
    add = parser.add_argument
    add("source", help="Hugging Face folder or hub id, or a folder with torch_dist/, e.g. of Megatron-LM")
    add("target", type=Path, help="new folder")
    add("--model", default=None, help="Hugging Face folder or hub id of the model in a trainer's checkpoint")
    add("--dtype", choices=DTYPES, default=None, help="data type of the weights; default: unchanged")
    add(
        "--mode",
        choices=MODES,
        default="raw",
        help="mapping of names and layouts: of rlscale, or of mbridge",
    )
    add("--tensor-parallel", type=int, default=1, help="tensor-parallel size")
    add("--pipeline-parallel", type=int, default=1, help="pipeline-parallel size")
    add("--expert-parallel", type=int, default=1, help="expert-parallel size")
    return parser


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Converts the weights. Returns the exit code."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    if args.target.exists():
        log.error("TARGET must be a new folder, got %s, which exists; choose another folder", args.target)
        return WRONG_INPUT
    if errors := check_arguments(args):
        log.error("%s", "\n".join(errors))
        return WRONG_INPUT
    try:
        _convert(args)
    except ConfigError as error:  # of keys of a run, which this command does not have
        log.error("%s", error_of_argument(error, name="SOURCE"))
        return WRONG_INPUT
    except DataError as error:
        log.error("%s", error)
        return WRONG_INPUT
    return DONE


def check_arguments(args: argparse.Namespace) -> list[str]:
    """Errors of the arguments, one line each; imports neither torch nor Megatron-core."""
    problems: list[Problem] = []
    if torch_dist_folder(args.source) is None:
        problems += _check_source(args.source)
    if args.model is not None:
        problems += check_model_path(args.model, name="--model")
    found = [*map(str, problems), *_target_errors(args.target), *_size_errors(args), *_package_errors(args)]
    return found if problems else [*found, *_architecture_errors(args.source, mode=args.mode)]


def _check_source(source: str) -> list[Problem]:
    folder = Path(os.path.expanduser(source))
    if folder.is_dir() and not (folder / "config.json").is_file():
        fix = "it has neither; check the path"
        rule = "be a Hugging Face folder (config.json) or one in Megatron-core's format (torch_dist/metadata.json)"
        return [Problem(path="SOURCE", rule=rule, value=source, fix=fix)]
    return check_model_path(source, name="SOURCE")


def _target_errors(target: Path) -> list[str]:
    """Errors of the nearest folder above the new one that exists."""
    above = next(each for each in target.absolute().parents if each.exists())
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return []
    return [f"TARGET must be in a folder that can be written, got {target}; {above} is not one"]


def _size_errors(args: argparse.Namespace) -> list[str]:
    """Errors of parallel sizes, which must divide the number of processes."""
    given = {name: os.environ.get(name, "1") for name in ("WORLD_SIZE", "RANK", "MASTER_PORT")}
    if wrong := [
        f"{name} must be a number, got {text}; unset it" for name, text in given.items() if not _is_count(text)
    ]:
        return wrong
    world_size = int(given["WORLD_SIZE"])
    sizes = {
        "--tensor-parallel": args.tensor_parallel,
        "--pipeline-parallel": args.pipeline_parallel,
        "--expert-parallel": args.expert_parallel,
    }
    wrong = [f"{flag} must be at least 1, got {size}" for flag, size in sizes.items() if size < 1]
    if wrong:
        return wrong
    # Experts are not split further, so tensor-parallel and expert-parallel ranks may be the same.
    products = {
        "--tensor-parallel times --pipeline-parallel": args.tensor_parallel * args.pipeline_parallel,
        "--expert-parallel times --pipeline-parallel": args.expert_parallel * args.pipeline_parallel,
    }
    start = "start it with torchrun --nproc-per-node <number>"
    return [
        f"{flags} must divide the number of processes ({world_size}), got {product}; {start}"
        for flags, product in products.items()
        if world_size % product
    ]


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _package_errors(args: argparse.Namespace) -> list[str]:
    # Imported here: the configuration takes longer to import than all of this module.
    from rlscale.config.installed import is_installed

    extras = {"megatron.core": "megatron"} | ({"mbridge": "bridge"} if args.mode == "bridge" else {})
    return [
        f"rlscale-convert must have the package {module.replace('.', '-')}; pip install 'rlscale[{extra}]'"
        for module, extra in extras.items()
        if not is_installed(module)
    ]


def _architecture_errors(source: str, *, mode: str) -> list[str]:
    """Errors of a model that Megatron-core does not support."""
    config_json = read_config_json(source)
    keys = MegatronKeys(uses_bridge=mode == "bridge", uses_hf_config=True)
    names = {"model.model_type": "the model_type of SOURCE", "model.megatron_to_hf_mode": "--mode"}
    # The advice is about keys of a run.
    return [
        f"{names.get(each.path, 'SOURCE')} must {each.rule.removesuffix(_OF_RUNS)}, got {each.value}"
        for each in (check_architecture(config_json, keys) if config_json else [])
    ]


def _convert(args: argparse.Namespace) -> None:
    import torch

    from rlscale.config import MegatronConfig
    from rlscale.config.groups.model import MegatronToHf
    from rlscale.training.distributed import join_world, leave_world
    from rlscale.training.megatron.checkpoint.convert_weights import convert_to_hf, convert_to_megatron, stored_dtype
    from rlscale.training.megatron.parallel_dims import destroy_parallel_dims

    is_megatron = torch_dist_folder(args.source) is not None
    # By default Megatron-core shards the experts with tensor parallelism too.
    expert = args.expert_parallel
    sizes = MegatronConfig(
        tensor_model_parallel_size=args.tensor_parallel,
        pipeline_model_parallel_size=args.pipeline_parallel,
        expert_model_parallel_size=expert,
        core_args={"expert_tensor_parallel_size": 1} if expert > 1 else {},
    )
    mode = MegatronToHf(args.mode)
    # Set by torchrun; one process alone is a world of size 1.
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", 0))
    join_world(rank, world_size, address, port, "nccl" if torch.cuda.is_available() else "gloo", 1800.0)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    started, source = time.perf_counter(), Path(args.source)
    if is_megatron:
        dtype = dtype or stored_dtype(source)
        found = convert_to_hf(source, args.target, model=args.model, sizes=sizes, dtype=dtype, mode=mode)
    else:
        found = convert_to_megatron(args.source, args.target, sizes=sizes, dtype=dtype, mode=mode)
    # All ranks write parts of the target; one reports.
    if rank == 0:
        seconds = time.perf_counter() - started
        log.info("%s: %d tensors, %.3g GB in %.1f s", args.target, found.num_tensors, found.num_bytes / 1e9, seconds)
    destroy_parallel_dims()
    leave_world()


if __name__ == "__main__":
    sys.exit(main())
