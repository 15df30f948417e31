"""Fetches every address that the documentation gives, and says what came back: ``python docs/tools/external_links.py``.

It needs a network, so no test runs it. Exit status 1 if an address doesn't answer. When all do, write the date into
``HOSTS``, the hosts that the documentation may link to.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Iterable

# When each host was last seen. On 2026-11-30 the threads on GitHub were read in a stored copy, where each is about
# what the page says; the others were looked over, not fetched.
HOSTS = {
    "arxiv.org": "2026-11-30",
    "citation-file-format.github.io": "2026-11-30",
    "github.com": "2026-11-30",
    "semver.org": "2026-11-30",
}


def status(address: str, timeout: float = 20) -> str:
    """What an address answers: "200", another status, or the error."""
    request = urllib.request.Request(address, headers={"User-Agent": "probelens documentation check"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as err:
        return str(err.code)
    except OSError as err:
        return f"no answer: {err}"


def main(addresses: Iterable[str]) -> int:
    """Print the status of each address; 1 if one isn't there."""
    failed = 0
    for address in addresses:
        found = status(address)
        failed += found != "200"
        print(f"{found}  {address}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    from docs_inventory import addresses, papers

    wanted = {found.text for found in addresses()} | {f"https://arxiv.org/abs/{number}" for number in papers()}
    sys.exit(main(sorted(wanted)))
