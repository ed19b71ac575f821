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
specplug generate --speculative-algorithm NGRAM --max-new-tokens 8 --trees trees.html "import os"
grep -q '"kind":"decode"' trees.html
specplug check EAGLE3 --only form --only conduct.waits
specplug bench --speculative-algorithms NGRAM --batch-sizes 1 --rounds 1 --num-prompts 1 --max-new-tokens 8
rm -rf made
specplug new MADE --kind ngram --path made
test -f made/.github/workflows/test.yml
echo "the wheels run: EAGLE3 writes what plain decoding does; the kit, the bench, a view and the template are there"
