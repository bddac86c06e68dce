"""The one state machine of every sample (contract 3): apply(event) is all that changes it."""

from flashflow.ledger.book import Rules
from flashflow.ledger.group import FINAL, WAITING, Group, Member, State
from flashflow.ledger.ledger import Ledger, Verdict

__all__ = ["FINAL", "WAITING", "Group", "Ledger", "Member", "Rules", "State", "Verdict"]
