# Sourced after unpack.sh, on a host of one GPU: what needs two GPUs runs on the one, where NCCL 2.31 or later was unpacked.
#
# Two ranks of an NCCL group may then share a GPU (NCCL_MULTI_RANK_GPU_ENABLE). Right and wrong show as on two; times do not:
# the ranks take turns on the GPU, and what they send each other goes through the host's memory. Every rank of a trainer
# takes GPU 0 (LOCAL_RANK), so this is for one host only. `on_gpu_0` is the start of a server's command line; a run is told
# of two GPUs by a nvidia-smi that lists the one twice. Returns 1, changing nothing, where there is no such library.
nccl=/tmp/rl360/nccl/libnccl.so.2
if [ ! -e "$nccl" ]; then
    echo "one_gpu.sh: no $nccl: what needs two GPUs is left out"
    return 1
fi
export NCCL_MULTI_RANK_GPU_ENABLE=1 LOCAL_RANK=0
on_gpu_0="env,'CUDA_VISIBLE_DEVICES=0'"
shared=/tmp/rl360/one_gpu
if [ ! -e "$shared" ]; then
    mkdir -p "$shared.new"
    # torch's libraries name the place of their own NCCL, unless one is there already. LD_PRELOAD would reach sandboxes, too.
    echo "import ctypes; ctypes.CDLL('$nccl', ctypes.RTLD_GLOBAL)" > "$shared.new/sitecustomize.py"
    smi=$(command -v nvidia-smi)
    cat > "$shared.new/nvidia-smi" << SCRIPT
#!/bin/sh
case "\$*" in
    *--query-gpu=name,memory.total*) $smi "\$@" && exec $smi "\$@" ;;
    *) exec $smi "\$@" ;;
esac
SCRIPT
    chmod +x "$shared.new/nvidia-smi"
    mv "$shared.new" "$shared"
fi
export PATH="$shared:$PATH" PYTHONPATH="$shared:$PYTHONPATH"
python3 -c 'import ctypes, torch
number = ctypes.c_int()
ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
print("one GPU for all ranks, NCCL", number.value)'
