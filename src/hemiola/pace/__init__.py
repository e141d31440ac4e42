"""How many workers an update waits for."""

from hemiola.pace.paces import KAsync, KBatchAsync, KBatchSync, KSync, Quorum

PACES: dict[str, type[Quorum]] = {pace.kind: pace for pace in (KSync, KBatchSync, KAsync, KBatchAsync)}

__all__ = ["PACES", "KAsync", "KBatchAsync", "KBatchSync", "KSync", "Quorum"]
