#!/usr/bin/env bash
# Rewrites requirements.lock from .venv: its header stays, what the header says is left out stays out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
{ grep '^#' requirements.lock
  .venv/bin/python -m pip --disable-pip-version-check freeze --all --exclude-editable \
    | grep -viE '^(pip|triton|torchvision|torchaudio|torchcodec)=' | sort -f; } >requirements.lock.new
mv requirements.lock.new requirements.lock
