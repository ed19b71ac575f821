"""``python -m specplug.cli`` is the ``specplug`` command."""

from specplug.cli import main

main()
