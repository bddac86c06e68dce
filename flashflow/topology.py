"""The only table of edges. Roles get their ends by name from here and never look an address up.

A *call* is a request with one reply; `streamed` calls send partial replies first.
"""

from typing import NamedTuple

from flashflow import messages as m

FLEET = ("buffer", "proxy", "engine", "env", "reward")
GANG = ("controller", "trainer")


class Edge(NamedTuple):
    caller: str
    callee: str
    message: type[m.Message]
    reply: type[m.Message] | tuple[type[m.Message], ...]
    streamed: bool = False


EDGES: tuple[Edge, ...] = (
    Edge("env", "buffer", m.AcquireLease, (m.Lease, m.NoLease)),
    Edge("env", "buffer", m.AwaitRevoked, m.Revoked),
    Edge("env", "buffer", m.AwaitScoring, m.ScoringReply),
    Edge("env", "buffer", m.Commit, m.CommitReply),
    Edge("env", "buffer", m.AttemptFailed, m.CommitReply),
    Edge("env", "proxy", m.Generate, m.GenerateReply, streamed=True),
    Edge("env", "proxy", m.Abort, m.Ack),
    Edge("env", "reward", m.Score, m.ScoreReply),
    Edge("proxy", "engine", m.Generate, m.GenerateReply, streamed=True),
    Edge("proxy", "engine", m.Abort, m.Ack),
    Edge("proxy", "engine", m.Update, m.Serving),
    Edge("proxy", "engine", m.Suspend, m.Ack),
    Edge("proxy", "engine", m.Resume, m.Ack),
    Edge("proxy", "engine", m.EngineStatusRequest, m.EngineStatus),
    Edge("controller", "proxy", m.Update, m.Serving),
    Edge("controller", "proxy", m.Suspend, m.Ack),
    Edge("controller", "proxy", m.Resume, m.Ack),
    Edge("controller", "proxy", m.EngineStatusRequest, m.EngineStatus),
    Edge("controller", "buffer", m.JournalStatusRequest, m.JournalStatus),
    Edge("controller", "buffer", m.NextBatch, m.BatchReply),
    Edge("controller", "buffer", m.ServingVersion, m.Ack),
    Edge("controller", "buffer", m.EnginesPaused, m.Ack),
    Edge("controller", "buffer", m.Checkpointed, m.Ack),
    Edge("controller", "buffer", m.Evaluate, m.EvalReply),
    Edge("controller", "buffer", m.Finish, m.Ack),
    Edge("trainer", "buffer", m.FetchRows, m.Rows),
)


def callees(role: str) -> list[str]:
    """Roles that `role` calls."""
    return sorted({edge.callee for edge in EDGES if edge.caller == role})


def is_server(role: str) -> bool:
    return any(edge.callee == role for edge in EDGES)
