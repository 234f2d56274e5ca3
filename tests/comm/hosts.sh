# Hosts for tests: network namespaces, connected by a switch at 100 Mbit/s. To be sourced.
#
#   enter_namespaces "$0" "$@"   # goes on inside of new namespaces; ends with a reason where the machine gives none
#   make_hosts 3                 # host 0 with 10.0.0.1, ...; ranks find host 0
#   on_host 1 COMMAND...         # with processes of its own, which end when this command is killed
#   cut_cable 1                  # from then on host 1 is cut off, until mend_cable 1
#   await_text TEXT TIMES FILE...

enter_namespaces() {
  [[ ${TESSERA_INSIDE:-} ]] && return
  local inside=(unshare --user --map-root-user --net --mount --pid --fork --mount-proc)
  if ! "${inside[@]}" true; then
    echo "skipped: this machine gives no namespaces"
    exit 0
  fi
  if ! command -v ip >/dev/null; then
    echo "skipped: there is no ip (iproute2)"
    exit 0
  fi
  TESSERA_INSIDE=1 exec "${inside[@]}" bash "$@"
}

make_hosts() {
  local host
  mount -t tmpfs none /run
  ip netns add switch
  ip -n switch link add switch type bridge
  ip -n switch link set switch up
  for ((host = 0; host < $1; ++host)); do
    ip netns add "host$host"
    ip link add "port$host" netns switch type veth peer name eth0 netns "host$host"
    ip -n switch link set "port$host" master switch up
    ip -n "host$host" link set lo up
    ip -n "host$host" link set eth0 up
    ip -n "host$host" address add "10.0.0.$((host + 1))/24" dev eth0
    tc -n "host$host" qdisc add dev eth0 root tbf rate 100mbit burst 128kb latency 50ms || echo "no rate: there is no tc"
  done
  export MASTER_ADDR=10.0.0.1 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
}

on_host() {
  exec ip netns exec "host$1" unshare --pid --fork --kill-child --mount-proc "${@:2}"
}

cut_cable() { ip -n switch link set "port$1" down; }
mend_cable() { ip -n switch link set "port$1" up; }

await_text() {
  for _ in $(seq 300); do
    [[ $(cat "${@:3}" 2>/dev/null | grep -c "$1") -ge $2 ]] && return
    sleep 0.1
  done
  echo "\"$1\" did not come $2 times:"
  cat "${@:3}"
  return 1
}
