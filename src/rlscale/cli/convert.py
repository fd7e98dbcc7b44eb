"""The command `rlscale-convert`: converts weights from Hugging Face to Megatron-core format and back."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlscale.errors import ConfigError, DataError
from rlscale.models.megatron_folder import torch_dist_folder

log = logging.getLogger("rlscale.convert")

DONE, WRONG_INPUT = 0, 2
MODES = ("raw", "bridge")
DTYPES = ("float32", "bfloat16", "float16")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlscale-convert",
        description="Converts weights from Hugging Face to Megatron-core format or back, depending on SOURCE. "
        "SOURCE may be a checkpoint of a Megatron trainer. Converting there and back gives the same bytes.",
        epilog="For a model that is too large for one process start several: torchrun --nproc-per-node 4 -m "
        "rlscale.cli.convert SOURCE TARGET --tensor-parallel 4. The result can be loaded with any parallel sizes. "
        "exit code: 0 done, 2 the input is wrong",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
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


def main(argv: Sequence[str] | None = None) -> int:
    """Converts the weights. Returns the exit code."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    if args.target.exists():
        log.error("TARGET must be a new folder, got %s, which exists; choose another folder", args.target)
        return WRONG_INPUT
    try:
        _convert(args)
    except (ConfigError, DataError) as error:
        log.error("%s", error)
        return WRONG_INPUT
    return DONE


def _convert(args: argparse.Namespace) -> None:
    import torch

    from rlscale.config import MegatronConfig
    from rlscale.config.groups.model import MegatronToHf
    from rlscale.training.distributed import join_world, leave_world
    from rlscale.training.megatron.checkpoint.convert_weights import convert_to_hf, convert_to_megatron, stored_dtype
    from rlscale.training.megatron.parallel_dims import destroy_parallel_dims

    is_megatron = torch_dist_folder(args.source) is not None
    if not is_megatron and Path(args.source).is_dir() and not (Path(args.source) / "config.json").is_file():
        fix = "it has neither; check the path"
        rule = "be a Hugging Face folder (config.json) or one in Megatron-core's format (torch_dist/metadata.json)"
        raise DataError(f"SOURCE must {rule}, got {args.source}; {fix}")
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
