#!/usr/bin/env bash
# Brings Lathe to a machine that has torch with CUDA and transformers, and no network.
#
#   gpu_environment.sh list              the packages that are brought
#   gpu_environment.sh fetch FOLDER      here, by Python 3.12: their wheels
#   gpu_environment.sh install FOLDER    there: install them, in seconds
#   gpu_environment.sh check             there: does it train? 30 seconds
#
# PYTHON names the interpreter (default: python3). torch, triton, transformers and what they bring
# (numpy, safetensors, tokenizers, ...) are the machine's own and stay as they are: --no-deps. DeepSpeed is
# built without compiled operators: AdamW is torch's fused one, so no nvcc is needed.
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-python3}"
packages=(
  liger-kernel==0.8.5
  deepspeed==0.19.8 hjson einops msgpack ninja py-cpuinfo psutil==7.2.2
  pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection
  accelerate==1.15.0 peft==0.21.2 ijson==3.6.0 wandb==0.31.0 haven-ai==0.7.3
  # what wandb asks for
  cwevals==0.0.1b1 distro sniffio platformdirs protobuf requests charset-normalizer urllib3 xxhash googleapis-common-protos
  opentelemetry-api opentelemetry-sdk opentelemetry-proto opentelemetry-semantic-conventions
  opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-otlp-proto-common
  opentelemetry-exporter-otlp-common opentelemetry-exporter-http-transport
  rouge-score==0.1.2 absl-py==2.5.1 nltk==3.10.4 defusedxml six
  scikit-learn==1.9.1 scipy==1.17.1 joblib threadpoolctl narwhals cloudpickle
  matplotlib==3.11.2 contourpy cycler fonttools kiwisolver pyparsing python-dateutil tzdata pillow
  typer==0.29.2 rich==15.0.0 click shellingham markdown-it-py mdurl pygments
  pytest==9.2.0 pytest-timeout==2.4.0 pluggy iniconfig hypothesis==6.170.15 sortedcontainers
)

case "${1:-}" in
  list) printf '%s\n' "${packages[@]}" ;;
  fetch)
    mkdir -p "$2"
    # what has no wheel is built from its source, without compiled operators
    DS_BUILD_OPS=0 "$python" -m pip wheel -q --no-deps -w "$2" "${packages[@]}"
    du -sh "$2" ;;
  install)
    SECONDS=0
    "$python" -m pip install -q --no-compile --no-index --no-deps --find-links "$2" "$2"/*.whl
    echo "installed in $SECONDS s" ;;
  check)
    SECONDS=0
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
    cd "$here"
    # its notebooks are left out; the machine's own packages are its own affair
    lacking="$("$python" -m pip check 2>/dev/null | grep -v '^haven-ai' | grep 'is not installed' || true)"
    [ -z "$lacking" ] || printf 'lacking: %s\n' "$lacking"
    "$python" -c 'import torch; print("torch", torch.__version__, "cuda", torch.cuda.is_available())'
    "$python" trainval.py -e crossattn_tiny -sb "$folder" --cache_dir "$folder/cache" --steps 24 -r 1 >"$folder/log" 2>&1 ||
      { tail -20 "$folder/log" >&2; exit 1; }
    "$python" - <<'PY'
from trainer.config.schema import Optim
from trainer.training import optimizers
import torch
made = optimizers.build([{"params": [torch.nn.Parameter(torch.zeros(2))]}], Optim(lr=0.1))
assert type(made) is torch.optim.AdamW and made.defaults["fused"], made
print("optimizer: torch's fused AdamW")
PY
    echo "trains; checked in $SECONDS s" ;;
  *) sed -n '2,12p' "$0"; exit 2 ;;
esac
