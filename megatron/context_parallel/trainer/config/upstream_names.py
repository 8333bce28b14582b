"""The names of Megatron-LM's other flags (commit d98e8a6): they are refused as its flags, not as misspelled ones."""

NAMES = """
account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split activation-func-clamp-value
activation-offload-fraction add-bias-linear adlr-autoresume adlr-autoresume-interval allow-ambiguous-pad-tokens
app-tag-run-name app-tag-run-version apply-wd-to-qk-layernorm async-ckpt-cpu-priority async-ckpt-io-priority
async-ckpt-use-cpu-shm async-strategy attention-output-gate batch-invariant-backend batch-invariant-mode
bert-embedder-type bert-load bert-no-binary-head biencoder-projection-dim biencoder-shared-query-context-model
block-data-path cache-mla-latents calc-ft-timeouts chat-template check-for-large-grads
check-weight-hash-across-dp-replicas-interval checkpoint-activations ckpt-convert-format ckpt-convert-save
ckpt-convert-update-legacy-dist-opt-format ckpt-drop-redundant-extra-state ckpt-fully-parallel-load-exchange-algo
ckpt-fully-parallel-load-per-rank-objects ckpt-fully-parallel-load-process-group
ckpt-fully-parallel-save-process-group ckpt-pg-tensors-cache-create ckpt-pg-tensors-cache-path classes-fraction
config-logger-dir cpu-offloading-num-layers cpu-offloading-retain-pinned-cpu-buffers create-all-gather-group
cuda-graph-impl cuda-graph-modules cuda-graph-scope cuda-graph-warmup-steps data-per-class-fraction
dataloader-defer-npy-index-mmap dataloader-fast-cache-load dataloader-inter-document-masking ddp-average-in-collective
ddp-param-name-patterns-for-fp32-local-accumulation ddp-reduce-scatter-with-fp32-accumulation decode-only-cuda-graphs
decoder-num-layers decoder-seq-length defer-embedding-wgrad-compute delay-offload-until-cuda-graph delay-wgrad-compute
delta-offload-bytes-across-pp-ranks deterministic-mode dino-bottleneck-size dino-freeze-last-layer
dino-head-hidden-size dino-local-crops-number dino-local-img-size dino-norm-last-layer dino-teacher-temp
dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs disable-align-grad-reduce
disable-bf16-reduced-precision-matmul disable-check-for-nan-in-loss disable-ckpt-load-validate-sharding-integrity
disable-clone-scatter-output-in-embedding disable-dsa-indexer-rotate-activation disable-dsa-indexer-scoring-relu
disable-filter-warnings disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
disable-flight-recorder-include-only-active disable-fp8-wgrad disable-jit-fuser disable-load-optim disable-load-rng
disable-log-loss-scale-to-tensorboard disable-manual-gc-eval disable-msc disable-pad-vocab-size disable-save-optim
disable-save-rng disable-save-tokenizer-assets disable-straggler-on-startup disable-strict-fsdp-dtensor-load
disable-symmetric-registration disable-tokenizer-sentencepiece-ignore-extra-whitespaces disable-tp-comm-bulk-dgrad
disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag
disable-tp-comm-split-rs disable-use-tokenizer-model-from-checkpoint-args dist-ckpt-optim-fully-reshardable
dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness dist-ckpt-workers distrib-optim-fully-reshardable-mem-efficient
distribute-saved-activations dsa-indexer-head-dim dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32
dsa-indexer-loss-coeff dsa-indexer-n-heads dsa-indexer-rope-interleaved dsa-indexer-skip-topk-offset dsa-indexer-topk
dsa-indexer-topk-freq dsa-indexer-use-sparse-loss dsa-kernel-backend dump-param-to-param-group-map
embedding-init-method-std embedding-path enable-chunked-prefill enable-cuda-graph enable-experimental
enable-ft-package enable-full-sharding-in-hsdp enable-mhc-connections enable-msc encoder-num-layers encoder-seq-length
ep-overlap-early-attn-memory-release error-injection-rate error-injection-type eval-global-batch-size
eval-micro-batch-size evidence-data-path exit-signal exit-signal-handler-for-dataloader
exit-signal-handler-for-training experimental-attention-variant expert-tensor-parallel-num-weight-shards
external-cuda-graph fake-process-group fim-eod-token fim-fragment-rate fim-middle-token fim-no-prefix fim-pad-token
fim-prefix-token fim-rate fim-split-sample fim-spm-rate fim-suffix-token fine-grained-activation-offloading
fine-grained-offloading-max-inflight-offloads first-last-layers-bf16 flash-attention-version flash-decode
flight-recorder-dump-path flight-recorder-include-stack-trace flight-recorder-trace-buffer-size
fp32-residual-connection fp4 fp4-param-gather fp4-quantizer-factory fp4-recipe fp8 fp8-interval fp8-margin
fp8-output-proj fp8-quantizer-factory freeze-all-layers fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer
fsdp-manual-registration ft-num-warmup-iters full-validation fully-parallel-load fully-parallel-save
fused-residual-rmsnorm gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute gdp-num-householder glu-linear-offset
gpu-sniff-test-interval grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-entropy-term-weight
grpo-filter-groups-with-same-reward grpo-group-size grpo-iterations grpo-kl-beta grpo-prompts-per-step
gtp-expert-remat-nccl-ub gtp-remat-nccl-ub gtp-remat-opt-in-modules gtp-remat-reduce-scatter-with-fp32-accumulation
head-lr-mult heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path high-priority-a2a-comm-stream
hybrid-layer-pattern hybrid-override-pattern ict-head-size ict-load img-h img-w indexer-batch-size
indexer-log-interval inference-batch-times-seqlen-threshold inference-coordinator-port
inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens inference-cuda-graph-scope
inference-disable-ep-consensus inference-disable-triton-nvls-kernels inference-dynamic-batching
inference-dynamic-batching-async-sched-mode inference-dynamic-batching-block-size
inference-dynamic-batching-buffer-size-gb inference-dynamic-batching-cuda-graph-mixed-prefill-count
inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-logprobs-mode
inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-max-requests
inference-dynamic-batching-max-tokens inference-dynamic-batching-num-cuda-graphs
inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-prefix-caching
inference-dynamic-batching-prefix-caching-coordinator-policy inference-dynamic-batching-prefix-caching-eviction-policy
inference-dynamic-batching-prefix-caching-mamba-gb inference-dynamic-batching-prefix-caching-routing-alpha
inference-dynamic-batching-sampling-backend inference-dynamic-batching-track-generated-token-events
inference-dynamic-batching-track-paused-request-events inference-dynamic-batching-unified-memory-level
inference-fuse-tp-communication inference-grouped-gemm-backend inference-logging-step-interval inference-max-requests
inference-max-seq-length inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type
inference-shards inference-text-gen-server-logging inference-use-synchronous-zmq-collectives inference-wandb-logging
init-model-with-meta-device inprocess-active-world-size inprocess-barrier-timeout inprocess-completion-timeout
inprocess-empty-cuda-cache inprocess-granularity inprocess-hard-timeout inprocess-heartbeat-interval
inprocess-heartbeat-timeout inprocess-last-call-wait inprocess-max-iterations inprocess-monitor-process-interval
inprocess-monitor-thread-interval inprocess-progress-watchdog-interval inprocess-restart inprocess-soft-timeout
inprocess-termination-grace-time is-hybrid-model iter-per-epoch iterations-to-skip keep-fp8-transpose-cache
kitchen-attention-backend kitchen-config-file kitchen-recipe-number kv-lora-rank langrl-env-config layernorm-epsilon
layernorm-zero-centered-gamma lazy-mpu-init linear-attention-freq linear-conv-kernel-dim linear-key-head-dim
linear-num-key-heads linear-num-value-heads linear-value-head-dim lion-beta1 lion-beta2 load-main-params-from-ckpt
local-rank log-device-memory-used log-l2-norm-grad-to-tensorboard log-memory-interval log-runtime-to-tensorboard
log-throughput-to-tensorboard logits-load-decode-threads logits-load-dir logits-load-ignore-errors
logits-load-kd-loss-alpha logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dir logits-save-dtype
logits-save-top-k logits-save-top-p logits-save-top-p-min-k lr-decay-steps lr-warmup-steps lr-wsd-decay-iters
lr-wsd-decay-samples lr-wsd-decay-style mamba-head-dim mamba-inference-conv-states-dtype
mamba-inference-ssm-states-dtype mamba-num-groups mamba-num-heads mamba-state-dim mamba-training-ssm-states-dtype
mask-factor mask-prob mask-type max-seqlen-per-dp-cp-rank max-tokens-to-oom
megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-grad-comm-dtype megatron-fsdp-main-grads-dtype
megatron-fsdp-main-params-dtype megatron-fsdp-max-pool-double-buffer megatron-fsdp-version memory-keys metadata-path
mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num mhc-sinkhorn-iterations
microbatch-group-size-per-vp-stage mid-level-dataset-surplus min-offloaded-tensor-size mla-down-proj-fusion
mlp-chunks-for-prefill modules-to-filter moe-apply-probs-on-input moe-combine-bwd-dtype
moe-deepep-num-sms moe-dispatch-fwd-dtype moe-enable-deepep moe-enable-routing-replay moe-expert-rank-capacity-factor
moe-flex-dispatcher-backend moe-flex-dispatcher-num-sms moe-hybridep-num-blocks-permute
moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms moe-hybridep-num-sms-preprocessing
moe-hybridep-pad-uneven-dispatch-inputs moe-input-jitter-eps moe-latent-size moe-layer-recompute
moe-mlp-glu-interleave-size moe-ncclep-zero-copy moe-pad-expert-input-to-capacity
moe-pad-experts-for-cuda-graph-inference moe-paged-stash moe-paged-stash-buffer-size-factor-cpu
moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size moe-per-layer-logging
moe-permute-fusion-into-hybridep moe-router-bias-update-rate moe-router-dtype moe-router-force-biased
moe-router-force-load-balancing moe-router-fusion moe-router-group-topk moe-router-num-groups
moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-router-quantile-balancing-ema
moe-router-score-function moe-router-topk-scaling-factor moe-routing-trace-capture-hidden-states
moe-routing-trace-capture-logits moe-routing-trace-dump-weights moe-routing-trace-max-training-iters
moe-routing-trace-path moe-shared-expert-gate moe-shared-expert-glu-interleave-size moe-shared-expert-overlap
moe-single-grouped-bias moe-single-grouped-weight moe-token-drop-policy moe-upcycling-granularity
moe-use-grouped-tensor moe-use-upcycling most-recent-k mrope-section mscale mscale-all-dim mtp-detach-heads mtp-hsm
mtp-hybrid-override-pattern mtp-loss-scaling-factor mtp-standalone mtp-use-repeated-layer multiple-validation-sets
muon-coefficient-type muon-extra-scale-factor muon-fp32-matmul-prec muon-momentum muon-nesterov muon-no-split-qkv
muon-num-ns-steps muon-scalar-optimizer muon-scale-mode muon-tp-mode muon-use-syrk mup-attn-scale-power
mup-base-head-dim mup-base-hidden-size mup-embedding-mult mup-output-mult mup-width-mult nccl-all-reduce-for-prefill
no-align-grad-reduce no-align-param-gather no-check-for-nan-in-loss no-ckpt-load-validate-sharding-integrity
no-clone-scatter-output-in-embedding no-data-sharding no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu
no-filter-warnings no-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec
no-flight-recorder-include-only-active no-fp8-wgrad no-gradient-reduce-div-fusion no-overlap-p2p-communication
no-pad-vocab-size no-pin-cpu-grads no-pin-cpu-params no-rope-freq no-save-tokenizer-assets no-strict-fsdp-dtensor-load
no-tokenizer-sentencepiece-ignore-extra-whitespaces no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag
no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs no-use-layer-wise-param-layout
no-use-tokenizer-model-from-checkpoint-args no-weight-decay-cond-type no-yarn-correction-range-round-to-int
non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo non-persistent-local-ckpt-dir
non-persistent-save-interval null-tokenizer-eod-id null-tokenizer-pad-id num-channels num-classes
num-dataset-builder-threads num-layers-at-end-in-bf16 num-layers-at-start-in-bf16 num-speculative-tokens nvtx-ranges
object-storage-cache-path offload-modules one-logger-async one-logger-project one-logger-run-name onnx-safe
optimizer-cuda-graph optimizer-offload-fraction otel-enabled otel-service-name otel-span-groups output-bert-embeddings
output-logit-dtype overlap-cpu-optimizer-d2h-h2d overlap-dispatch-backward-with-experts-wgrad
overlap-moe-expert-parallel-comm overlap-p2p-comm-warmup-flush overlap-param-gather-with-optimizer-step
override-ckpt-iteration override-opt-param-scheduler padded-vocab-size patch-dim per-dataset-sequences-path
perform-initialization perform-rl-step phase-transition-iterations pipeline-model-parallel-comm-backend
pretrained-checkpoint q-lora-rank qk-clip qk-clip-alpha qk-clip-threshold qk-head-dim qk-l2-norm qk-pos-emb-head-dim
query-in-block-prob quick-geglu record-shapes refit-method relative-attention-max-distance
relative-attention-num-buckets replication replication-factor replication-jump result-rejected-tracker-filename
retriever-report-topk-accuracies retriever-score-scaling reuse-grad-buf-for-mxfp8-param-ag rl-consumption-granularity
rl-default-temperature rl-default-top-k rl-default-top-p rl-durable-rollout-bank rl-generation-lag
rl-importance-sampling-truncation-coef rl-inference-expert-model-parallel-size
rl-inference-expert-tensor-model-parallel-size rl-inference-logprobs-is-correction
rl-inference-model-unified-memory-level rl-inference-parsers rl-inference-pipeline-model-parallel-size
rl-inference-tensor-model-parallel-size rl-kv-cache-management-mode rl-max-inflight-requests
rl-offload-inference-model-weights-when-idle rl-offload-optimizer-during-inference rl-partial-rollouts
rl-persist-cuda-graphs rl-profile rl-profile-dir rl-prompts-per-eval rl-rollout-bank-dir rl-rollout-bank-max-bytes
rl-sequence-packing-algo rl-sequence-packing-max-sequences-per-bin rl-skip-bos-token rl-submission-granularity
rl-training-cuda-graphs rl-use-sequence-packing rl-verify-model-weights-swap rope-type rotary-scaling-factor
run-workload-inspector-server runtime-time-unit sample-rate save-activations-interval save-config-filepath
save-dgrads-interval save-params-interval save-tokens-per-expert-interval save-wgrads-interval
set-level-for-all-loggers sft-tokenizer-prompt-format sgd-momentum sharp-enabled-group short-seq-prob spec
special-tokens start-eval-at-iter straggler-ctrlr-port straggler-minmax-count suggested-communication-unit-size
swin-backbone-type symmetric-ar-type te-precision-config-file te-rng-tracker tensor-parallel-num-weight-shards
throughput-window-size tiktoken-num-special-tokens titles-data-path tokenizer-hf-no-include-special-tokens
tokenizer-hf-no-use-fast tokenizer-sentencepiece-legacy torch-fsdp2-no-reshard-after-forward tp-comm-bootstrap-backend
tp-comm-overlap-rs-dgrad train-sync-interval trust-remote-code use-checkpoint-opt-param-scheduler
use-fused-weighted-squared-relu use-gigatoken use-gloo-process-groups use-grouped-gemm-for-dense-mlp
use-grouped-gemm-for-shared-expert use-kitchen-attention use-legacy-static-engine use-mamba-mem-eff-path
use-mp-args-from-checkpoint-args use-mup use-nccl-ub use-nsys-profiler use-one-sent-docs use-ring-exchange-p2p
use-same-sampling-seed-across-dp-ranks use-sharp use-te-activation-func use-torch-optimizer-for-cpu-offload
use-transformer-engine-op-fuser v-head-dim validation-set-names verify-integrity vision-backbone-type
vision-pretraining vision-pretraining-type vocab-extra-ids wd-incr-steps wgrad-deferral-limit window-attn-skip-freq
wsd-decay-steps yarn-beta-fast yarn-beta-slow yarn-correction-range-round-to-int yarn-original-max-position-embeddings
""".split()  # noqa: SIM905
