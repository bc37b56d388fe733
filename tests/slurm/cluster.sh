#!/usr/bin/env bash
# A real two-node SLURM cluster on this machine, for the tests in this folder. See README.md beside this file.
#   tests/slurm/cluster.sh up      install what is missing, configure, start; idempotent
#   tests/slurm/cluster.sh down    cancel all jobs and stop the daemons; --purge drops state and logs too
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
BASE=/var/tmp/vissl_zero_slurm   # state, spool, logs, pid files
CONF=/etc/slurm/slurm.conf
NODES=(node1 node2)
CPUS=4                           # what a node claims; the tests need 2 tasks a node, whatever the machine has
MEMORY_MB=8000

say() { echo "slurm cluster: $*"; }
running() { # running PIDFILE NAME: is the process of that pid file alive, and is it what we think?
  [[ -s $1 && -r /proc/$(<"$1")/comm && $(<"/proc/$(<"$1")/comm") == "$2" ]]
}
stop() { # stop PIDFILE NAME
  running "$1" "$2" || return 0
  local pid; pid=$(<"$1")
  kill -TERM "$pid"
  for _ in {1..100}; do [[ -d /proc/$pid ]] || return 0; sleep 0.1; done
  kill -KILL "$pid"
}

install_packages() {
  local missing=()
  for package in munge slurmctld slurmd slurm-client; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  say "installing ${missing[*]}"
  # Packages must not start daemons of their own; that takes a policy file, where there is none.
  local policy=/usr/sbin/policy-rc.d made=0
  if [[ ! -e $policy ]]; then printf '#!/bin/sh\nexit 101\n' >$policy; chmod 755 $policy; made=1; fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  if ((made)); then rm -f $policy; fi
}

name_nodes() { # the daemons bind to what these names resolve to, and ranks meet at the name of the first node
  for name in "$(hostname -s)" "${NODES[@]}"; do
    getent ahostsv4 "$name" | grep -q '^127\.0\.0\.1 ' || echo "127.0.0.1 $name" >>/etc/hosts
  done
}

configuration() {
  cat <<END
ClusterName=vissl-zero-tests
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=16917
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job may start again after this many seconds (120 on a stock cluster).
AuthInfo=socket=/run/munge/munge.socket.2,cred_expire=5
# Listen on the address that the host's name has, not on every interface.
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation=$BASE/state
SlurmdSpoolDir=$BASE/spool/%n
SlurmctldPidFile=$BASE/run/slurmctld.pid
SlurmdPidFile=$BASE/run/slurmd.%n.pid
SlurmctldLogFile=$BASE/log/slurmctld.log
SlurmdLogFile=$BASE/log/slurmd.%n.log
# No cgroups, no accounting, no MPI.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
# Believe the sizes below, whatever the hardware says.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0
# A job that is evicted is first sent its own --signal and then has GraceTime to save.
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
MinJobAge=600
InactiveLimit=0
Waittime=0
SlurmctldTimeout=30
SlurmdTimeout=60
JobRequeue=1
NodeName=node[1-2] NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=[17101-17102] CPUs=$CPUS Sockets=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=$MEMORY_MB State=UNKNOWN
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=urgent Nodes=node[1-2] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
END
}

start_munge() {
  install -d -o munge -g munge -m 755 /run/munge
  install -d -o munge -g munge -m 700 /etc/munge /var/lib/munge /var/log/munge
  if [[ ! -s /etc/munge/munge.key ]]; then
    (umask 077; head -c 1024 /dev/urandom >/etc/munge/munge.key)
    chown munge:munge /etc/munge/munge.key
  fi
  running /run/munge/munged.pid munged || setpriv --reuid=munge --regid=munge --init-groups /usr/sbin/munged
  for _ in {1..50}; do munge -n 2>/dev/null | unmunge >/dev/null 2>&1 && return 0; sleep 0.1; done
  say "munge does not answer"; return 1
}

up() {
  [[ $(id -u) == 0 ]] || { say "needs root"; exit 2; }
  if [[ -s $CONF ]] && ! grep -q "^StateSaveLocation=$BASE/state$" $CONF; then
    say "$CONF belongs to another cluster and is left alone"; exit 3
  fi
  install_packages
  name_nodes
  mkdir -p $BASE/{state,log,run} /etc/slurm
  for node in "${NODES[@]}"; do mkdir -p "$BASE/spool/$node"; done
  local wanted; wanted=$(configuration)
  if [[ ! -f $CONF || $wanted != "$(<$CONF)" ]]; then  # daemons that run with another configuration start afresh
    for node in "${NODES[@]}"; do stop "$BASE/run/slurmd.$node.pid" slurmd; done
    stop $BASE/run/slurmctld.pid slurmctld
    echo "$wanted" >$CONF
  fi
  [[ -f /etc/slurm/cgroup.conf ]] || printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n' >/etc/slurm/cgroup.conf
  start_munge
  # setsid, no descriptors of ours: whoever waits for this script's output must not wait for the daemons.
  running $BASE/run/slurmctld.pid slurmctld || setsid slurmctld </dev/null >/dev/null 2>&1
  for node in "${NODES[@]}"; do
    running "$BASE/run/slurmd.$node.pid" slurmd || setsid slurmd -N "$node" </dev/null >/dev/null 2>&1
  done
  for _ in {1..150}; do
    if [[ $(timeout 5 sinfo -h -N -p main -t idle,mix,alloc -o %N 2>/dev/null | sort -u | wc -l) == "${#NODES[@]}" ]]; then
      say "up, ${NODES[*]}"; return 0
    fi
    sleep 0.2
  done
  say "not all nodes came up; see $BASE/log"; exit 1
}

down() {
  if running $BASE/run/slurmctld.pid slurmctld; then
    timeout 10 scancel --state=PENDING --quiet --user=root || true
    timeout 10 scancel --quiet --user=root || true
    for _ in {1..150}; do [[ -z $(timeout 5 squeue -h 2>/dev/null) ]] && break; sleep 0.1; done
  fi
  for node in "${NODES[@]}"; do stop "$BASE/run/slurmd.$node.pid" slurmd; done
  stop $BASE/run/slurmctld.pid slurmctld
  stop /run/munge/munged.pid munged
  [[ ${1:-} != --purge ]] || rm -rf $BASE
  say "down"
}

case ${1:-} in
  up) up ;;
  down) shift; down "$@" ;;
  *) echo "usage: $0 up | down [--purge]" >&2; exit 2 ;;
esac
