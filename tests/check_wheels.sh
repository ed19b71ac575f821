#!/usr/bin/env bash
# What users do first, in an environment that has the wheels alone: make check-dist.
set -euo pipefail

python -c 'import pathlib, specplug; print("specplug of", pathlib.Path(specplug.__file__).parent)'
specplug list
specplug doctor
specplug info EAGLE3 > info.txt
drafted=$(specplug generate --speculative-algorithm EAGLE3 --max-new-tokens 16 "def quicksort(items):")
plain=$(specplug generate --speculative-algorithm NONE --max-new-tokens 16 "def quicksort(items):")
echo "$drafted"
[ "$drafted" = "$plain" ]
echo "the wheels run, and EAGLE3 writes what plain decoding does"
