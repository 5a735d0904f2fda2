#!/usr/bin/env bash
# A whole one-node Kubernetes cluster in private namespaces, then the command that is given, with KUBECONFIG set.
# Everything ends with it. Run by tests/cluster/__main__.py as root:
#   RUN=folder IMAGES="a.tar b.tar" PYTHON=python unshare --mount --net --pid --fork --kill-child bash node.sh COMMAND...
# KUBEBUILDER_ASSETS holds kube-apiserver, -controller-manager, -scheduler, -proxy and kubelet; etcd, containerd, runc,
# iptables and the CNI plugins are the distribution's.
set -euo pipefail
: "${KUBEBUILDER_ASSETS:?}" "${RUN:?}" "${IMAGES:?}" "${PYTHON:?}"
HERE=$(cd "$(dirname "$0")" && pwd)
REPO=$(cd "$HERE/../.." && pwd)
BIN=$KUBEBUILDER_ASSETS
POOL=sluice-test
mkdir -p "$RUN"/{etcd,certs,cni,log}
cd "$RUN"

for controller in cpu cpuacct cpuset memory devices freezer blkio pids systemd; do
  if [ -d "/sys/fs/cgroup/$controller" ]; then mkdir -p "/sys/fs/cgroup/$controller/$POOL"; fi
done
# All pods together would weigh as much as one other process of a busy machine.
if [ -f "/sys/fs/cgroup/cpu/$POOL/cpu.shares" ]; then echo 10240 > "/sys/fs/cgroup/cpu/$POOL/cpu.shares"; fi

mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mkdir -p /run/lock /run/netns
mount --make-rshared /
ip link set lo up
ip link add cni0 type bridge
ip addr add 10.244.0.1/24 dev cni0
ip link set cni0 up
ip route add default via 10.244.0.254 dev cni0
sysctl -q -w net.ipv4.ip_forward=1
sysctl -q -w net.bridge.bridge-nf-call-iptables=1 2> /dev/null || true
printf 'nameserver 10.244.0.1\n' > resolv.conf

openssl genrsa -out sa.key 2048 2> /dev/null
echo 'admintoken,admin,admin,"system:masters"' > tokens.csv
cat > kubeconfig <<CONFIG
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:16443", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: admintoken}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
CONFIG
cat > cni/10-bridge.conflist <<CONFIG
{"cniVersion": "0.4.0", "name": "k", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
   "ipam": {"type": "host-local", "dataDir": "$RUN/cni-ipam", "routes": [{"dst": "0.0.0.0/0"}],
            "ranges": [[{"subnet": "10.244.0.0/24", "rangeStart": "10.244.0.10", "rangeEnd": "10.244.0.250"}]]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
CONFIG
cat > containerd.toml <<CONFIG
version = 2
root = "$RUN/containerd"
state = "$RUN/containerd-state"
[grpc]
  address = "$RUN/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$RUN/cni"
CONFIG

etcd --data-dir etcd --listen-client-urls http://127.0.0.1:23790 --advertise-client-urls http://127.0.0.1:23790 \
  --listen-peer-urls http://127.0.0.1:23800 --unsafe-no-fsync > log/etcd.log 2>&1 &
"$BIN/kube-apiserver" --etcd-servers=http://127.0.0.1:23790 --bind-address=0.0.0.0 --advertise-address=10.244.0.1 \
  --secure-port=16443 --cert-dir=certs --token-auth-file=tokens.csv --authorization-mode=RBAC \
  --service-cluster-ip-range=10.96.0.0/16 --service-account-key-file=sa.key \
  --service-account-signing-key-file=sa.key --service-account-issuer=https://kubernetes.default.svc \
  --allow-privileged=true --kubelet-preferred-address-types=InternalIP > log/apiserver.log 2>&1 &
containerd -c containerd.toml > log/containerd.log 2>&1 &
for _ in $(seq 240); do
  curl -sk -m 2 -H 'Authorization: Bearer admintoken' https://127.0.0.1:16443/readyz 2> /dev/null | grep -q '^ok' && break
  sleep 0.25
done
for image in $IMAGES; do ctr -a containerd.sock -n k8s.io images import "$image" > /dev/null; done
"$BIN/kube-controller-manager" --kubeconfig kubeconfig --leader-elect=false \
  --service-account-private-key-file=sa.key --root-ca-file=certs/apiserver.crt > log/controllers.log 2>&1 &
(cd "$REPO" && exec "$PYTHON" -m tests.cluster.dns "$RUN/kubeconfig" 10.244.0.1) > log/dns.log 2>&1 &
"$BIN/kube-scheduler" --kubeconfig kubeconfig --leader-elect=false > log/scheduler.log 2>&1 &
"$BIN/kube-proxy" --kubeconfig kubeconfig --proxy-mode=iptables --cluster-cidr=10.244.0.0/24 --hostname-override=node \
  --oom-score-adj=0 --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 \
  --conntrack-tcp-timeout-close-wait=0 > log/proxy.log 2>&1 &
"$BIN/kubelet" --kubeconfig kubeconfig --container-runtime=remote \
  --container-runtime-endpoint="unix://$RUN/containerd.sock" --cgroup-driver=cgroupfs --cgroup-root="/$POOL" \
  --fail-swap-on=false --root-dir="$RUN/kubelet" --hostname-override=node --node-ip=10.244.0.1 --oom-score-adj=0 \
  --eviction-hard='memory.available<50Mi' --image-gc-high-threshold=100 --max-pods=60 --sync-frequency=2s \
  --cert-dir="$RUN/kubelet-pki" --volume-plugin-dir="$RUN/plugins" --cluster-domain=cluster.local \
  --cluster-dns=10.244.0.1 --resolv-conf="$RUN/resolv.conf" --protect-kernel-defaults=false \
  --feature-gates=SizeMemoryBackedVolumes=true > log/kubelet.log 2>&1 &
export KUBECONFIG=$RUN/kubeconfig
ready() {
  curl -sk -m 2 -H 'Authorization: Bearer admintoken' https://127.0.0.1:16443/api/v1/nodes/node 2> /dev/null \
    | grep -q '"reason": "KubeletReady"'
}
for _ in $(seq 240); do ready && break; sleep 0.5; done
ready || { echo "the node did not become ready; see $RUN/log" >&2; exit 1; }
cd "$REPO"
"$@"
