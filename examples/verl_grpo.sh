#!/bin/sh
# Asynchronous GRPO with verl 0.9.1, measured: what is added to verl's own command line is marked.
# Needs GPUs, verl with its engine, and this library in the same environment:
#
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct TRAIN=gsm8k/train.parquet VAL=gsm8k/test.parquet sh examples/verl_grpo.sh
#
# Then: rl-staleness steps checkpoints/rollout_trace.jsonl
set -eu

export VERL_USE_EXTERNAL_MODULES=rl_staleness.integrations.verl # added: verl imports it as it starts

# added: the trainer's mode, and a warning (any of OPTIONS in integrations/verl.py)
exec python -m verl.trainer.main_ppo \
    trainer.v1.trainer_mode=staleness_separate_async \
    +trainer.staleness.warn_age_above=16 \
    trainer.v1.separate_async.parameter_sync_step=4 \
    data.train_batch_size=256 \
    data.train_files="$TRAIN" \
    data.val_files="$VAL" \
    data.return_raw_chat=True \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.hybrid_engine=False \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.nnodes=1 \
    actor_rollout_ref.rollout.n_gpus_per_node="${ROLLOUT_GPUS:-1}" \
    actor_rollout_ref.rollout.checkpoint_engine.backend=nccl \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node="${TRAINER_GPUS:-1}" \
    trainer.default_local_dir=checkpoints \
    'trainer.logger=["console","wandb"]' \
    "$@"
