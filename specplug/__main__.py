"""``python -m specplug`` is the ``specplug`` command."""

from specplug.cli import main

main()
