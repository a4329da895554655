#!/bin/bash
# The first process of a user-mode Linux whose root is this machine's, read-only. Serves a disk to itself by NFS, does
# the faults $FAULTS of disk_faults.py with $PYTHON there, and halts. What it mounts ends with it.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp PYTHONDONTWRITEBYTECODE=1
mount -t tmpfs none /tmp
{
  mount -t proc proc /proc
  mount -t sysfs sys /sys
  for folder in /run /var/lib/nfs; do mount -t tmpfs none "$folder"; done
  mkdir -p /dev/shm /dev/pts /tmp/kernel/lib /tmp/served /tmp/hard /tmp/soft
  mount -t tmpfs none /dev/shm
  mount -t devpts none /dev/pts
  ln -s /proc/self/fd /dev/fd
  hostname guest
  ip link set lo up
  ln -s /usr/lib/uml/modules /tmp/kernel/lib/modules
  for module in nfsd nfs nfsv4 loop; do modprobe -d /tmp/kernel "$module"; done
  truncate -s 800M /tmp/image
  mkfs.ext4 -q -F /tmp/image
  mount -o loop /tmp/image /tmp/served
  mkdir -p /var/lib/nfs/{v4recovery,rpc_pipefs,sm}
  touch /var/lib/nfs/{etab,rmtab}
  mount -t nfsd nfsd /proc/fs/nfsd
  echo 15 >/proc/fs/nfsd/nfsv4leasetime
  echo 15 >/proc/fs/nfsd/nfsv4gracetime
  exportfs -o rw,no_root_squash,fsid=0,insecure,no_subtree_check 127.0.0.1:/tmp/served
  rpc.mountd --no-udp -N 3
  rpc.nfsd --no-udp -N 3 4
  sleep 1
  mount -t nfs4 -o hard,timeo=50,nosharecache 127.0.0.1:/ /tmp/hard
  mount -t nfs4 -o soft,timeo=50,retrans=2,nosharecache 127.0.0.1:/ /tmp/soft
} >/tmp/setup 2>&1 </dev/null
findmnt -n /tmp/hard >/dev/null || cat /tmp/setup
"$PYTHON" "$PROGRAM" --in-guest ${FAULTS//,/ } </dev/null
sync
halt -f
