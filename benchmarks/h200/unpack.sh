# Sourced on a CUDA host without a package index: unpack the offline bundle and bubblewrap, and put both on the path.
#
# In: /tmp/rl360-parts/bundle.part* (tar.xz in pieces), Debian's bubblewrap and libcap2 packages beside them, and extra/ with
# Python packages that the host lacks for the tests (pytest-asyncio); where there are flash.part* (tar.xz of a pip --target
# folder with flash-attn-4 4.0.0b19 and nvidia-cutlass-dsl's libraries for CUDA 13, which the bundle leaves out), those too;
# where there are te.part* (one with Transformer Engine 2.20.2), it lies in /tmp/rl360/te and is on nobody's path; where there
# are more.part* (tar.xz), what it adds to the bundle: site/ (binaries of further attention kernels) and nccl/libnccl.so.2.
# Out: /tmp/rl360/site with SGLang, Megatron, Ray, Harbor and the rest; bwrap; the model as an HF folder in $RL360_MODELS.
set -euo pipefail
parts=/tmp/rl360-parts
if [ ! -e /tmp/rl360/ready ]; then
    mkdir -p /tmp/rl360
    cat "$parts"/bundle.part* | xz -T0 -d | tar x -C /tmp/rl360
    for package in "$parts"/*.deb; do dpkg -x "$package" /tmp/rl360/debian; done
    if ls "$parts"/flash.part* >/dev/null 2>&1; then
        mkdir -p /tmp/rl360/flash
        cat "$parts"/flash.part* | xz -T0 -d | tar x -C /tmp/rl360/flash
    fi
    if ls "$parts"/more.part* >/dev/null 2>&1; then cat "$parts"/more.part* | xz -T0 -d | tar x -C /tmp/rl360; fi
    touch /tmp/rl360/ready
fi
if [ ! -e /tmp/rl360/te ] && ls "$parts"/te.part* >/dev/null 2>&1; then
    mkdir -p /tmp/rl360/te.new
    cat "$parts"/te.part* | xz -T0 -d | tar x -C /tmp/rl360/te.new
    mv /tmp/rl360/te.new /tmp/rl360/te
fi
flash=/tmp/rl360/flash
export PYTHONPATH="$PWD:$flash:$flash/nvidia_cutlass_dsl/dsl_packages:/tmp/rl360/site:$parts/extra${PYTHONPATH:+:$PYTHONPATH}"
export PATH="/tmp/rl360/site/bin:/tmp/rl360/debian/usr/bin:$PATH"
export LD_LIBRARY_PATH="/tmp/rl360/debian/lib/x86_64-linux-gnu:/tmp/rl360/debian/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export HARBOR_TELEMETRY=0 LITELLM_LOCAL_MODEL_COST_MAP=True TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export RL360_MODELS=/tmp/rl360/models
if [ ! -e "$RL360_MODELS/smollm2_135m/config.json" ]; then
    mkdir -p "$RL360_MODELS/smollm2_135m"
    python3 -c 'import sys; from pathlib import Path; from rl360.models.gguf_checkpoint import convert; convert(Path(sys.argv[1]), Path(sys.argv[2]))' \
        /tmp/rl360/smollm2-135m-instruct.Q4_1.gguf "$RL360_MODELS/smollm2_135m"
fi
