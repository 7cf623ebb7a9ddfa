#!/bin/sh
# What is to be run on a GPU next, in this order; each line goes on where it was stopped when it is called again.
# Usage: sh benchmarks/screening.sh {paper-letters|server-weight|contest-letters|contest-cifar10|screen|screen-100|semifl-look|semifl} FOLDER
# FOLDER holds cifar10.npz and emnist47.npz. Minutes are estimates for one H200, nothing else on it.
# Several runs at a time need NVIDIA's MPS (docs/speed.md).
set -e
what=$1 data=$2
common="--set run.checkpoint_every=10000"
case $what in
paper-letters) # the twelve runs on letters that are missing in results/paper, 100 epochs: about 20 minutes, six at a time
    printf '%s\n' "3 --only R0.9-" 48 "6 --only T32-" "6 --only T8-" "6 --only T4-" 41 40 "6 --only T2-" | xargs -P 3 -L 1 \
        ssfl paper run --data "$data/emnist47.npz" --jobs 2 --quiet --out runs/paper ;;
server-weight) # FedAvg with the mean weight of the server in grouping, C = 10, 30 and 47, three seeds: nine runs of
    # 100 epochs, about 20 minutes, six at a time
    printf '%s\n' "C10 --set method.server_weight=0.16667" "C30 --set method.server_weight=0.09091" \
        "C47 --set method.server_weight=0.09636" | sed 's/^/--only crl-gn-R0.4-T16-Ns4700-/' | xargs -P 3 -L 1 \
        ssfl paper run 16 --seeds 3 --jobs 2 --quiet --data "$data/emnist47.npz" --out runs/paper ;;
contest-letters) # 8 methods, up to seven half runs to choose by and three seeds each, 5 epochs: about 20 minutes
    ssfl contest emnist-47 --methods anchored,alternate,semifl,cbafed,grouping,fl2,crl-gn,server-only --seeds 3 \
        --set data.path="$data/emnist47.npz" --set federation.epochs=5 $common --jobs 3 \
        --out runs/contest-letters ;;
contest-cifar10) # 10 of 100 users, Dirichlet 0.1, 4,000 labels, 4 epochs: about 25 minutes for these five
    ssfl contest cifar10-100 --methods anchored,alternate,semifl,cbafed,server-only --seeds 3 \
        --set data.path="$data/cifar10.npz" --set federation.epochs=4 $common --jobs 2 \
        --out runs/contest-cifar10 ;;
screen) # one seed, 5 epochs, ten users, validation images alone: 23 runs, about 40 minutes, three at a time 25
    python -m benchmarks.variants screen --config cifar10-10 --seeds 1 --jobs 3 --out runs/screen \
        --set data.path="$data/cifar10.npz" --set data.validation=0.1 --set run.test=never \
        --set federation.epochs=5 $common --json results/screen-cifar10-h200.json ;;
screen-100) # the same with 10 of 100 users and Dirichlet 0.1: about 25 minutes
    python -m benchmarks.variants screen --config cifar10-100 --seeds 1 --jobs 3 --out runs/screen-100 \
        --set data.path="$data/cifar10.npz" --set data.validation=0.1 --set run.test=never \
        --set federation.epochs=5 $common --json results/screen-cifar10-100-h200.json ;;
semifl-look) # the first 100 of its 800 rounds; by the authors' curve, test accuracy is about 81 % there
    ssfl run semifl-published --set data.path="$data/cifar10.npz" --set federation.rounds=100 \
        --set train.horizon=8 --set run.eval_every=10 --out runs/semifl-look || ssfl resume runs/semifl-look ;;
semifl) # as published: at most 490,000 steps of all users and 64,000 of the server. Beside five other runs, a round took
    # 4.5 s; alone it was not timed. A checkpoint has the momentum of 100 users: 611 MB
    ssfl run semifl-published --set data.path="$data/cifar10.npz" --out runs/semifl-published \
        || ssfl resume runs/semifl-published ;;
*) echo "no job $what" >&2; exit 2 ;;
esac
