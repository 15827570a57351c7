"""The process of one replica: python -m peagle.server.replica_process SETTINGS (as JSON)."""

import json
import sys

from peagle.errors import UserError
from peagle.server.run import serve
from peagle.server.settings import ServerSettings


def main(settings_json: str) -> None:
    values = json.loads(settings_json)
    tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    try:
        serve(ServerSettings(**values | tuples))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1])
