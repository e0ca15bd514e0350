// Package volumes prepares what a pod mounts: folders for emptyDir, host
// paths, and files made of ConfigMaps, Secrets, the pod itself and service
// account tokens, which are switched atomically when their source changes.
//
// Owner: the pod's worker, one call at a time per pod. Nothing runs in the
// background. Everything made for a pod is below one folder per base folder,
// named by the pod's UID, so that Teardown needs no record of it.
package volumes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Source gives the objects that volumes are made of, from the node's own
// copy of the assignment.
type Source interface {
	ConfigMap(namespace, name string) (*corev1.ConfigMap, bool)
	Secret(namespace, name string) (*corev1.Secret, bool)
	// Token is a service account token for the pod, when the node has one.
	Token(pod *corev1.Pod, p *corev1.ServiceAccountTokenProjection) (string, bool)
}

// ImageSource is the optional ability of a Source to mount images.
type ImageSource interface {
	// MountImage mounts what the image holds on an empty folder, read-only.
	MountImage(ctx context.Context, vol *corev1.ImageVolumeSource, target string) error
}

// MissingError names what a volume or variable refers to and the node does
// not have (yet).
type MissingError struct {
	Kind, Namespace, Name, Key string
}

// Error implements error.
func (e *MissingError) Error() string {
	if e.Key != "" {
		return fmt.Sprintf("couldn't find key %s in %s %s/%s", e.Key, e.Kind, e.Namespace, e.Name)
	}
	return fmt.Sprintf("%s %q not found", strings.ToLower(e.Kind), e.Name)
}

// Config says where and how.
type Config struct {
	Dir string // durable: emptyDir and configuration files
	// MemoryDir is on a memory file system (the run-time folder), for what
	// must not reach the disk; empty or not in memory: Dir is used instead.
	MemoryDir string
	// ClaimsDir has the volumes of claims, which outlive pods; the agent's
	// alone. Limited, if not nil, hears whether the size of one is limited.
	ClaimsDir string
	Limited   Limits
	Logger    *slog.Logger
}

// Volumes prepares and takes down. Safe for concurrent use on different pods.
type Volumes struct {
	c      Config
	root   bool
	memory bool // MemoryDir really is in memory

	unmount func(path string) error // tests make it fail

	making sync.Mutex // held while a claim's volume is made
	owned  sync.Map   // pod uid and path of volumes whose owner was set for the pod
}

// New makes the base folders.
func New(c Config) (*Volumes, error) {
	v := &Volumes{c: c, root: os.Geteuid() == 0, unmount: unmount}
	if err := os.MkdirAll(c.Dir, 0o711); err != nil {
		return nil, fmt.Errorf("volumes: %w", err)
	}
	if c.MemoryDir != "" {
		if err := os.MkdirAll(c.MemoryDir, 0o711); err != nil {
			return nil, fmt.Errorf("volumes: %w", err)
		}
		v.memory = inMemory(c.MemoryDir)
	}
	return v, nil
}

// SecretsOnDisk says that secret volumes reach the disk on this node.
func (v *Volumes) SecretsOnDisk() bool { return !v.memory }

func (v *Volumes) podDir(base, uid string) (string, error) {
	if uid == "" || uid == "." || uid == ".." || strings.ContainsAny(uid, "/\x00") {
		return "", fmt.Errorf("pod uid %q cannot name a folder", uid)
	}
	return filepath.Join(base, uid), nil
}

// Prepare makes or refreshes all volumes of the pod and returns their host
// paths by name. It is idempotent; a *MissingError is worth trying again.
func (v *Volumes) Prepare(ctx context.Context, pod *corev1.Pod, src Source, f Facts) (map[string]string, error) {
	paths := make(map[string]string, len(pod.Spec.Volumes))
	var errs []error
	for i := range pod.Spec.Volumes {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		vol := &pod.Spec.Volumes[i]
		p, err := v.prepare(ctx, pod, vol, src, f)
		if err != nil {
			errs = append(errs, fmt.Errorf("volume %q: %w", vol.Name, err))
			continue
		}
		paths[vol.Name] = p
	}
	return paths, errors.Join(errs...)
}

func (v *Volumes) prepare(ctx context.Context, pod *corev1.Pod, vol *corev1.Volume, src Source, f Facts) (string, error) {
	switch {
	case vol.HostPath != nil:
		return hostPath(vol.HostPath)
	case vol.EmptyDir != nil:
		return v.emptyDir(pod, vol)
	case vol.Image != nil:
		return v.image(ctx, pod, vol, src)
	case vol.PersistentVolumeClaim != nil:
		return v.claim(pod, vol.PersistentVolumeClaim.ClaimName, src, f)
	case vol.Ephemeral != nil:
		return v.claim(pod, manifests.EphemeralClaimName(pod, vol.Name), src, f)
	case vol.ConfigMap != nil:
		files, err := configMapFiles(pod.Namespace, vol.ConfigMap.LocalObjectReference, vol.ConfigMap.Items, vol.ConfigMap.Optional, src)
		if err != nil {
			return "", err
		}
		return v.project(pod, vol.Name, v.c.Dir, files, f, vol.ConfigMap.DefaultMode)
	case vol.Secret != nil:
		ref := corev1.LocalObjectReference{Name: vol.Secret.SecretName}
		files, err := secretFiles(pod.Namespace, ref, vol.Secret.Items, vol.Secret.Optional, src)
		if err != nil {
			return "", err
		}
		return v.project(pod, vol.Name, v.secretDir(), files, f, vol.Secret.DefaultMode)
	case vol.DownwardAPI != nil:
		files, err := downwardFiles(pod, vol.DownwardAPI.Items, f)
		if err != nil {
			return "", err
		}
		return v.project(pod, vol.Name, v.c.Dir, files, f, vol.DownwardAPI.DefaultMode)
	case vol.Projected != nil:
		files, secret, err := projectedFiles(pod, vol.Projected, src, f)
		if err != nil {
			return "", err
		}
		base := v.c.Dir
		if secret {
			base = v.secretDir()
		}
		return v.project(pod, vol.Name, base, files, f, vol.Projected.DefaultMode)
	}
	return "", errors.New("this kind of volume is not supported by this node")
}

func (v *Volumes) secretDir() string {
	if v.memory {
		return v.c.MemoryDir
	}
	return v.c.Dir
}

// dir makes the volume's own folder.
func (v *Volumes) dir(base string, pod *corev1.Pod, name string) (string, error) {
	p, err := v.podDir(base, string(pod.UID))
	if err != nil {
		return "", err
	}
	if name != filepath.Base(name) || name == "." || name == ".." {
		return "", fmt.Errorf("volume name %q cannot name a folder", name)
	}
	if err := os.Mkdir(p, 0o711); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	return filepath.Join(p, name), nil
}

// image mounts an image; one that is mounted stays what it is.
func (v *Volumes) image(ctx context.Context, pod *corev1.Pod, vol *corev1.Volume, src Source) (string, error) {
	m, ok := src.(ImageSource)
	if !ok || !v.root {
		return "", errors.New("image volumes need root, and a node with runc (or crun) and conmon")
	}
	p, err := v.dir(v.c.Dir, pod, vol.Name)
	if err != nil {
		return "", err
	}
	if err := os.Mkdir(p, 0o711); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	if mounted(filepath.Dir(p), p) {
		return p, nil
	}
	return p, m.MountImage(ctx, vol.Image, p)
}

func (v *Volumes) emptyDir(pod *corev1.Pod, vol *corev1.Volume) (string, error) {
	p, err := v.dir(v.c.Dir, pod, vol.Name)
	if err != nil {
		return "", err
	}
	if err := os.Mkdir(p, 0o777); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	if vol.EmptyDir.Medium == corev1.StorageMediumMemory && !inMemory(p) {
		var size int64
		if q := vol.EmptyDir.SizeLimit; q != nil {
			size = q.Value()
		}
		switch err := v.mountMemory(p, size); {
		case errors.Is(err, errors.ErrUnsupported):
			v.c.Logger.Warn("emptyDir with medium Memory is on disk: mounting tmpfs needs root",
				"pod", pod.Namespace+"/"+pod.Name, "volume", vol.Name)
		case err != nil:
			return "", err
		}
	}
	mode := os.FileMode(0o777)
	if g := fsGroup(pod); g != nil && v.root {
		if err := os.Lchown(p, -1, int(*g)); err != nil {
			return "", err
		}
		mode |= os.ModeSetgid
	}
	return p, os.Chmod(p, mode) // the umask took some of it
}

func fsGroup(pod *corev1.Pod) *int64 {
	if pod.Spec.SecurityContext == nil {
		return nil
	}
	return pod.Spec.SecurityContext.FSGroup
}

// owner of files made for the pod.
func (v *Volumes) owner(pod *corev1.Pod, f Facts) (uid, gid int) {
	uid, gid = f.UID, f.GID
	sc := pod.Spec.SecurityContext
	if sc != nil && sc.RunAsUser != nil {
		uid = int(*sc.RunAsUser)
	}
	if sc != nil && sc.RunAsGroup != nil {
		gid = int(*sc.RunAsGroup)
	}
	if g := fsGroup(pod); g != nil {
		gid = int(*g)
	}
	if !v.root {
		return -1, -1
	}
	return uid, gid
}

// hostPath checks or makes the path as its type says.
func hostPath(h *corev1.HostPathVolumeSource) (string, error) {
	p := filepath.Clean(h.Path)
	if !filepath.IsAbs(p) {
		return "", fmt.Errorf("hostPath %q is not absolute", h.Path)
	}
	t := corev1.HostPathUnset
	if h.Type != nil {
		t = *h.Type
	}
	switch t {
	case corev1.HostPathUnset:
		return p, nil
	case corev1.HostPathDirectoryOrCreate:
		if err := os.MkdirAll(p, 0o755); err != nil {
			return "", fmt.Errorf("hostPath: %w", err)
		}
	case corev1.HostPathFileOrCreate:
		f, err := os.OpenFile(p, os.O_CREATE|os.O_RDONLY, 0o644)
		if err != nil {
			return "", fmt.Errorf("hostPath: %w", err)
		}
		_ = f.Close()
	}
	st, err := os.Stat(p)
	if err != nil {
		return "", fmt.Errorf("hostPath type check failed: %w", err)
	}
	m := st.Mode()
	ok := map[corev1.HostPathType]bool{
		corev1.HostPathDirectory: m.IsDir(), corev1.HostPathDirectoryOrCreate: m.IsDir(),
		corev1.HostPathFile: m.IsRegular(), corev1.HostPathFileOrCreate: m.IsRegular(),
		corev1.HostPathSocket:   m&os.ModeSocket != 0,
		corev1.HostPathCharDev:  m&os.ModeCharDevice != 0,
		corev1.HostPathBlockDev: m&os.ModeDevice != 0 && m&os.ModeCharDevice == 0,
	}[t]
	if !ok {
		return "", fmt.Errorf("hostPath type check failed: %s is not a %s", p, t)
	}
	return p, nil
}

// SubPath resolves a path inside a volume, making it as a folder when it
// does not exist. Symbolic links are followed only inside the volume.
func SubPath(volume, sub string) (string, error) {
	if filepath.IsAbs(sub) || slices.Contains(strings.Split(sub, "/"), "..") {
		return "", fmt.Errorf("subPath %q must be relative and inside the volume", sub)
	}
	root, err := os.OpenRoot(volume)
	if err != nil {
		return "", fmt.Errorf("subPath: %w", err)
	}
	defer func() { _ = root.Close() }()
	if err := makeFolders(root, sub); errors.Is(err, syscall.EROFS) {
		return "", fmt.Errorf("subPath %q is not in the volume, and that is read-only", sub)
	} else if err != nil {
		return "", fmt.Errorf("subPath %q: %w", sub, err)
	}
	f, err := root.Open(sub) // refuses every link that leads out
	if err != nil {
		return "", fmt.Errorf("subPath %q: %w", sub, err)
	}
	defer func() { _ = f.Close() }()
	// What was opened is named by the kernel, so that nothing is resolved
	// again by its links.
	p, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return "", fmt.Errorf("subPath %q: %w", sub, err)
	}
	base, err := filepath.EvalSymlinks(volume)
	if err != nil {
		return "", fmt.Errorf("subPath %q: %w", sub, err)
	}
	if p != base && !strings.HasPrefix(p, base+"/") {
		return "", fmt.Errorf("subPath %q leads out of the volume", sub)
	}
	return p, nil
}

// makeFolders makes what is missing of a path. The new folders have the mode of
// the volume's own, as the kubelet makes them: who may write there may write
// here, a user that is not root above all.
func makeFolders(root *os.Root, sub string) error {
	if _, err := root.Stat(sub); !errors.Is(err, os.ErrNotExist) {
		return nil // opening it will say what is wrong
	}
	own, err := root.Stat(".")
	if err != nil {
		return err
	}
	at := ""
	for part := range strings.SplitSeq(filepath.Clean(sub), "/") {
		at = filepath.Join(at, part)
		if _, err := root.Stat(at); !errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err := root.Mkdir(at, 0o700); errors.Is(err, os.ErrExist) {
			continue // by another container of the pod
		} else if err != nil {
			return err
		}
		if err := root.Chmod(at, own.Mode()&(os.ModePerm|os.ModeSetgid|os.ModeSticky)); err != nil {
			return err
		}
	}
	return nil
}

// Teardown removes everything made for the pod. It never follows a symbolic
// link, and host paths are left alone.
func (v *Volumes) Teardown(_ context.Context, podUID string) error {
	var errs []error
	v.owned.Range(func(k, _ any) bool {
		if k.(ownedKey).pod == podUID {
			v.owned.Delete(k)
		}
		return true
	})
	bases := []string{v.c.Dir}
	if v.memory {
		bases = append(bases, v.c.MemoryDir)
	}
	for _, base := range bases {
		p, err := v.podDir(base, podUID)
		if err != nil {
			return err
		}
		if err := v.teardown(base, p); err != nil {
			errs = append(errs, fmt.Errorf("remove volumes: %w", err))
		}
	}
	return errors.Join(errs...)
}

func (v *Volumes) teardown(base, p string) error {
	st, err := os.Lstat(p)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if st.IsDir() {
		if err := v.unmountAll(p); err != nil {
			return err // and nothing is removed: it is tried again
		}
	}
	root, err := os.OpenRoot(base)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	return root.RemoveAll(filepath.Base(p))
}

// mounted says whether q, a folder in p, is a mount point.
func mounted(p, q string) bool {
	var a, b syscall.Stat_t
	return syscall.Lstat(p, &a) == nil && syscall.Lstat(q, &b) == nil && a.Dev != b.Dev
}

// List names the pods that have something here, to find what was forgotten.
func (v *Volumes) List() ([]string, error) {
	var out []string
	for _, base := range []string{v.c.Dir, v.c.MemoryDir} {
		if base == "" {
			continue
		}
		entries, err := os.ReadDir(base)
		if err != nil {
			return nil, fmt.Errorf("list volumes: %w", err)
		}
		for _, e := range entries {
			if e.IsDir() && workload.IsUID(e.Name()) && !slices.Contains(out, e.Name()) {
				out = append(out, e.Name())
			}
		}
	}
	return out, nil
}

// DiskUsage is what a pod's volumes take on the durable disk.
func (v *Volumes) DiskUsage(podUID string) (bytes, inodes int64) {
	dir, err := v.podDir(v.c.Dir, podUID)
	if err != nil {
		return 0, 0
	}
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // it may go meanwhile
		}
		if filepath.Dir(path) == dir && d.IsDir() && mounted(dir, path) {
			return fs.SkipDir // an image, or memory
		}
		inodes++
		if info, err := d.Info(); err == nil && d.Type().IsRegular() {
			bytes += info.Size()
		}
		return nil
	})
	return bytes, inodes
}
