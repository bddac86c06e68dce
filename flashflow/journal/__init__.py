"""The ledger and its payloads on disk (contract 4)."""

from flashflow.journal.base import EventLog, OpenJournal
from flashflow.journal.journal import Journal, open_journal, replay
from flashflow.journal.offload import Offload, in_place
from flashflow.journal.payloads import Payloads

__all__ = ["EventLog", "Journal", "Offload", "OpenJournal", "Payloads", "in_place", "open_journal", "replay"]
