# The first process of the guest of tests.support.nfs.
exec >"$LOG" 2>&1
export PATH=$ROOT/usr/sbin:$ROOT/sbin:/sbin:/usr/sbin:/bin:/usr/bin PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
unpacked() { LD_LIBRARY_PATH=$ROOT/usr/lib/x86_64-linux-gnu:$ROOT/lib/x86_64-linux-gnu "$@"; }
mount -t proc none /proc
mount -t sysfs none /sys
for folder in /run /mnt /var/lib; do mount -t tmpfs none $folder; done
mkdir -p /mnt/1 /mnt/2 /mnt/server /var/lib/nfs/{nfsdcld,v4recovery,rpc_pipefs}
touch /var/lib/nfs/{etab,rmtab}
hostname server
ip link set lo up
ln -s "$ROOT/bin/kmod" /run/modprobe
ln -s "$ROOT/bin/kmod" /run/depmod
cp -r "$MODULES" /run/modules
unpacked /run/depmod -b /run/modules "$(uname -r)"
for module in nfsd nfsv4 veth; do unpacked /run/modprobe -d /run/modules $module; done
mount -t ext4 /dev/ubda /mnt/server
mount -t rpc_pipefs none /var/lib/nfs/rpc_pipefs
mount -t nfsd none /proc/fs/nfsd
unpacked nfsdcld -F &
sleep 0.5
unpacked exportfs -i -o rw,sync,no_root_squash,fsid=0,no_subtree_check '*:/mnt/server'
unpacked rpc.mountd -N 3 -F >/dev/null 2>&1 &
sleep 0.5
start_server() { unpacked rpc.nfsd -N 3 -G 10 -L 10 4; }
stop_server() { unpacked rpc.nfsd 0; }
start_server
mkdir /mnt/server/shared
for i in 1 2; do
  unshare -n -u sleep 100000 &
  client[i]=$!
  sleep 0.3
  nsenter -t ${client[i]} -u hostname "client$i"
  ip link add "v$i" type veth peer name "e$i"
  ip link set "e$i" netns ${client[i]}
  ip addr add "10.0.$i.1/24" dev "v$i"
  ip link set "v$i" up
  nsenter -t ${client[i]} -n ip addr add "10.0.$i.2/24" dev "e$i"
  nsenter -t ${client[i]} -n ip link set "e$i" up
  unpacked nsenter -t ${client[i]} -n -u "$ROOT/sbin/mount.nfs4" "10.0.$i.1:/shared" "/mnt/$i" -o rw,vers=4.2,hard
done
on() { nsenter -t ${client[$1]} -n -u "$PYTHON" "$FOLDER/$2.py" "/mnt/$1"; }
source "$FOLDER/script"
echo the script has ended
echo o >/proc/sysrq-trigger
sleep 10
