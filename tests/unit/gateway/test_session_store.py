"""Sessions that no one finishes: the gateway forgets them."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlscale.engines.fake import FakeServer
from rlscale.gateway.engine_calls import GenerateCalls
from rlscale.gateway.session_log import SessionLog
from rlscale.gateway.session_store import KEEP_S, SessionStore
from rlscale.types import EngineAddress
from tests.gateway_codec import VOCAB_SIZE, build_codec
from tests.unit.gateway.test_session import make_spec


async def test_an_expired_session_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delete, failing = SessionLog.delete, set[str]()

    def refuse(file: SessionLog) -> None:
        if file.path.stem in failing:
            raise OSError("the disk failed")
        delete(file)

    monkeypatch.setattr(SessionLog, "delete", refuse)
    with FakeServer(vocab_size=VOCAB_SIZE) as fake, ThreadPoolExecutor(1) as threads:
        engines = GenerateCalls([EngineAddress(name="engine 0", url=fake.url)], router=None, timeout_s=10)
        store = SessionStore(tmp_path, build_codec(), threads, on_drop=engines.forget)
        expired = [make_spec(expires_s=time.time() - KEEP_S - 1) for _ in range(4)]
        for spec in (*expired, open_one := make_spec()):
            await store.open(spec)
            (answer,) = await engines.generate(spec.id, [5, 6], spec.params, n=1)
            assert answer.interval_s is not None and answer.interval_s[0] <= answer.interval_s[1]
        failing.add(expired[0].id)  # must not keep the others
        assert engines.num_sessions == 5 and await store.drop_expired() == 4
        assert (len(store), engines.num_sessions) == (1, 1) and store.find(open_one.id) is not None
        assert {path.stem for path in tmp_path.iterdir()} == {open_one.id, expired[0].id}
        await engines.close()
