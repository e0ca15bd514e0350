package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// What the containers of one pod share beside their network: an IPC
// namespace, held by a mount of it, and /dev/shm. Both are there from the
// pod's first container to RemovePod.
const (
	ipcFile = "ipc"
	shmDir  = "shm"
	shmSize = "size=65536k"
)

func (r *Runtime) podsDir() string { return filepath.Join(r.cfg.RunDir, "p") }
func (r *Runtime) podDir(uid string) string {
	return filepath.Join(r.podsDir(), folderName(workload.ID{PodUID: uid}))
}

// shared makes what the pod's containers share, and returns its folder.
func (r *Runtime) shared(ctx context.Context, uid string) (dir string, err error) {
	unlock, err := r.lock(ctx, workload.ID{PodUID: uid})
	if err != nil {
		return "", err
	}
	defer unlock()
	dir = r.podDir(uid)
	shm, ipc := filepath.Join(dir, shmDir), filepath.Join(dir, ipcFile)
	if err := os.MkdirAll(shm, 0o711); err != nil {
		return "", fmt.Errorf("what the pod shares: %w", err)
	}
	if !mounted(shm) {
		if err := unix.Mount("shm", shm, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC|unix.MS_NODEV, "mode=1777,"+shmSize); err != nil {
			return "", fmt.Errorf("mount /dev/shm of the pod: %w", err)
		}
	}
	if !mounted(ipc) {
		if err := os.WriteFile(ipc, nil, 0o600); err != nil {
			return "", fmt.Errorf("what the pod shares: %w", err)
		}
		if err := newIPC(ipc); err != nil {
			return "", fmt.Errorf("IPC namespace of the pod: %w", err)
		}
	}
	return dir, nil
}

// newIPC makes an IPC namespace that lives as long as it is mounted there.
func newIPC(path string) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends in its namespace
		err := unix.Unshare(unix.CLONE_NEWIPC)
		if err == nil {
			err = unix.Mount(fmt.Sprintf("/proc/self/task/%d/ns/ipc", unix.Gettid()), path, "", unix.MS_BIND, "")
		}
		done <- err
	}()
	return <-done
}

// RemovePod implements workload.PodRemover.
func (r *Runtime) RemovePod(ctx context.Context, uid string) error {
	unlock, err := r.lock(ctx, workload.ID{PodUID: uid})
	if err != nil {
		return err
	}
	defer unlock()
	return r.unshare(r.podDir(uid))
}

// RemovePods does so for all pods.
func (r *Runtime) RemovePods() error {
	dirs, err := filepath.Glob(filepath.Join(r.podsDir(), "*"))
	errs := []error{err}
	for _, d := range dirs {
		errs = append(errs, r.unshare(d))
	}
	return errors.Join(errs...)
}

func (r *Runtime) unshare(dir string) error {
	for _, p := range []string{filepath.Join(dir, shmDir), filepath.Join(dir, ipcFile)} {
		for mounted(p) {
			if err := unix.Unmount(p, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
				return fmt.Errorf("unmount %s: %w", p, err)
			}
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("what the pod shared: %w", err)
	}
	return nil
}
