#!/bin/bash
# Runs a command on two hosts that share this machine and yet have networks of their own (Linux):
#     bash two_hosts.sh 'torchrun --nnodes 2 --nproc-per-node 2 --node-rank $NODE --master-addr 10.0.0.1 who.py'
# NODE is 0 on the first host and 1 on the second. Their addresses are 10.0.0.1 and 10.0.0.2, and their network
# interface is called eth0. Each host is a network namespace. All of it, with all processes, is gone when the script ends.

set -euo pipefail

if [ "${1:-}" != inside ]; then
    command -v ip > /dev/null || { echo "This needs the program ip, from the package iproute2." >&2; exit 1; }
    new=(unshare --user --map-root-user --net --mount --pid --fork --kill-child)
    if ! "${new[@]}" true 2> /dev/null; then
        new=(unshare --net --mount --pid --fork --kill-child)  # root needs no new user
        "${new[@]}" true 2> /dev/null || { echo "This machine does not allow network namespaces." >&2; exit 1; }
    fi
    "${new[@]}" bash "$0" inside "$@" &
    trap 'kill -KILL $! 2> /dev/null || true' EXIT  # unshare ignores Ctrl-C; --kill-child ends what is inside with it
    trap 'exit 130' INT TERM
    wait $!
    exit
fi

shift
mount -t tmpfs none /run           # for the names of the hosts
mount -t proc proc /proc
for node in 0 1; do ip netns add "host$node"; done
ip link add eth0 netns host0 type veth peer name eth0 netns host1
for node in 0 1; do
    ip -n "host$node" link set lo up
    ip -n "host$node" address add "10.0.0.$((node + 1))/24" dev eth0
    ip -n "host$node" link set eth0 up
done
hosts=()
for node in 0 1; do
    NODE=$node ip netns exec "host$node" bash -c "$*" &
    hosts+=($!)
done
failed=0
for host in "${hosts[@]}"; do wait "$host" || failed=1; done
exit $failed
