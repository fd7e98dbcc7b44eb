"""The scripted engine as a process, for models that the embedded engine does not run and for further nodes of one.

It answers with scripted tokens, and receives and verifies weights as a real engine does.

Usage: python -m rlscale.rehearsal.fake_server <model folder> <host> <port>
"""

import asyncio
import os
import sys
from pathlib import Path

from rlscale.architectures.hf_config import read_config_json
from rlscale.engines.fake import FakeService, Faults
from rlscale.engines.launch import API_KEY_VARIABLE
from rlscale.engines.process_lifetime import die_with_parent
from rlscale.engines.server.engine_service import build_app
from rlscale.engines.server.generate_request import Limits
from rlscale.engines.server.http_server import Server
from rlscale.expert_routes import RouteShape
from rlscale.weights.receiver import EngineReceiver


async def serve(model: Path, host: str, port: int) -> None:
    """Serves until a signal."""
    fields = read_config_json(str(model))
    routes = _route_shape(fields)
    limits = Limits(
        vocab_size=int(fields["vocab_size"]),
        max_context_len=int(fields["max_position_embeddings"]),
        has_experts=routes is not None,
    )
    service = FakeService(limits, Faults(), receiver=EngineReceiver(), routes=routes)
    server = Server(build_app(service, api_key=os.environ.get(API_KEY_VARIABLE)), host=host, port=port)
    await server.start()
    await server.run()


def _route_shape(fields: dict[str, int]) -> RouteShape | None:
    experts = fields.get("n_routed_experts") or fields.get("num_experts") or fields.get("num_local_experts")
    if not experts:
        return None
    chosen, layers = int(fields["num_experts_per_tok"]), int(fields["num_hidden_layers"])
    return RouteShape(num_layers=layers, num_chosen=chosen, num_experts=int(experts))


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
