"""The output of all roles of a slot as one console: every line with the name of who said it."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

POLL_S = 0.2


class MergedLogs:
    """Follows log files from where they end now; the files stay what they are."""

    def __init__(self, logs: Mapping[str, Path]) -> None:
        """By the name that stands before each line."""
        self._logs = logs
        self._read = {name: path.stat().st_size if path.exists() else 0 for name, path in logs.items()}

    async def follow(self) -> None:
        """For ever."""
        while True:
            self.print_news()
            await asyncio.sleep(POLL_S)

    def print_news(self, *, all_of_it: bool = False) -> None:
        """Whole lines; `all_of_it`: the last one even if nothing ends it."""
        for name, path in self._logs.items():
            if not path.exists():
                continue
            with path.open("rb") as log:
                log.seek(self._read[name])
                news = log.read()
            if not all_of_it:
                news = news[: news.rfind(b"\n") + 1]
            self._read[name] += len(news)
            for line in news.decode(errors="replace").splitlines():
                print(f"{name} | {line}", file=sys.stdout)
        sys.stdout.flush()
