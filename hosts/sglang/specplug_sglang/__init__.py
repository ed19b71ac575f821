"""specplug's algorithms inside SGLang: ``--speculative-algorithm SPECPLUG_EAGLE3``.

SGLang calls ``register`` in each of its processes, by the entry point ``sglang.srt.plugins``. It
reserves the names of its own algorithms, so every installed one is called SPECPLUG_<name> there.

Classes named Specplug... implement SGLang's interfaces: SGLang calls them. Classes named Sglang...
implement specplug's interfaces: specplug and its plugins call them.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Register every installed algorithm, if this is a version of SGLang that was tested.

    Another version is refused in one line on the log, and SGLang then knows none of the names: an
    exception here would come out of every start of SGLang, speculation or not.
    """
    from specplug_sglang.capabilities import PLAIN, PREFIX, UntestedVersion, check_version

    try:
        check_version()
    except UntestedVersion as error:
        logging.getLogger(__name__).error("%s", error)
        return

    from specplug import Registry
    from specplug_sglang.algorithm import register_algorithm

    for name in Registry().names():
        if name != PLAIN:
            register_algorithm(PREFIX + name, name)
