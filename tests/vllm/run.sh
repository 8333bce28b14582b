#!/usr/bin/env bash
# vLLM decodes what 1, 2 and 4 of our ranks prefilled: bash tests/vllm/run.sh
# It makes an environment for vLLM in build/vllm (or VLLM_ENV), and takes some minutes; .ci/run does not call it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

vllm=${VLLM_ENV:-build/vllm}
bash tests/vllm/install.sh "$vllm"
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1
export VLLM_ENABLE_V1_MULTIPROCESSING=0
work=$(mktemp -d)
started=()
end_all() {
    (($? == 0)) || tail -n 20 "$work"/server-*.log # why a server ended, if one did
    kill "${started[@]}" 2>/dev/null || true
    wait
    rm -rf "$work"
}
trap end_all EXIT
.venv/bin/python -m tests.vllm.model "$work" 2>"$work/model.log"

serve() { # NAME RANKS [flags]: a server, whose port is then in $port
    local name=$1 ranks=$2
    shift 2
    : >"$work/server-$name.log" # the server below may be slower than the first look into it
    .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        tools/run_text_generation_server.py --load "$work/model" --port 0 --handoff-host 127.0.0.1 \
        --cache-tokens 8192 "$@" >"$work/server-$name.log" 2>&1 &
    started+=($!)
    for _ in $(seq 180); do
        port=$(sed -n 's#^listening at .*:\([0-9]*\), model .*$#\1#p' "$work/server-$name.log")
        [[ -z $port ]] || return 0
        sleep 1
    done
    return 1
}
decode() { # NAME ...: a part of the test in vLLM's environment
    local name=$1
    shift
    # Two workers of vLLM spin while they wait for each other: on two cores our ranks would not run for half a minute.
    nice -n 10 "$vllm/bin/python" -m "$@" 2>"$work/$name.log" | grep -E '^(ok|FAILED)|WARNING.*connector.py' || {
        tail -n 40 "$work/$name.log"
        exit 1
    }
}

ports=()
for ranks in 1 2 4; do # the prompts of 300 and 700 tokens come in chunks
    serve "ranks$ranks" "$ranks" --inference-dynamic-batching-max-tokens 256
    ports+=("$port")
done
for tensor in 1 2; do
    export VLLM_CPU_OMP_THREADS_BIND=auto
    ((tensor == 1)) || export VLLM_CPU_OMP_THREADS_BIND="0|1" # a core for each worker
    for block in 32 128; do
        decode "decode$tensor-$block" tests.vllm.decode "$work" "$tensor" "$block" "${ports[@]}"
    done
done
export VLLM_CPU_OMP_THREADS_BIND=auto
decode proxy tests.vllm.proxy "$work" "$vllm/bin/python" "${ports[1]}"
serve short 2 --handoff-seconds 2
decode decoders tests.vllm.decoders "$work" "$vllm/bin/python" "${ports[1]}" "$port"
decode failures tests.vllm.failures "$work" "${ports[1]}" "$port" "${started[1]}"
echo "vLLM: all passed"
