package volumes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/manifests"
)

// ClaimSource gives the claims and volumes of the node's pods; the optional
// ability of a Source.
type ClaimSource interface {
	Claim(namespace, name string) (*corev1.PersistentVolumeClaim, bool)
	PersistentVolume(name string) (*corev1.PersistentVolume, bool)
}

// ErrNotBound says that a claim has no volume yet: the servers make it once
// they know the pod's node.
var ErrNotBound = errors.New("not bound to a volume yet")

// Limits says what came of limiting a volume's size.
type Limits func(pv *corev1.PersistentVolume, err error)

// Bound finds the volume of a claim that a pod mounts, once both name each
// other.
func Bound(pod *corev1.Pod, claim string, src Source) (*corev1.PersistentVolume, error) {
	s, ok := src.(ClaimSource)
	if !ok {
		return nil, errors.New("this node does not know any claims")
	}
	c, ok := s.Claim(pod.Namespace, claim)
	if !ok {
		return nil, &MissingError{Kind: "PersistentVolumeClaim", Namespace: pod.Namespace, Name: claim}
	}
	if c.Spec.VolumeName == "" {
		return nil, fmt.Errorf("claim %q: %w", claim, ErrNotBound)
	}
	v, ok := s.PersistentVolume(c.Spec.VolumeName)
	switch {
	case !ok:
		return nil, &MissingError{Kind: "PersistentVolume", Name: c.Spec.VolumeName}
	case !manifests.Bound(c, v):
		return nil, fmt.Errorf("claim %q, volume %q: %w", claim, v.Name, ErrNotBound)
	}
	return v, nil
}

// claim makes the folder of a claim's volume, or finds it.
func (v *Volumes) claim(pod *corev1.Pod, claim string, src Source, f Facts) (string, error) {
	pv, err := Bound(pod, claim, src)
	if err != nil {
		return "", err
	}
	switch {
	case manifests.IsLocalVolume(pv):
		return v.local(pod, pv, f)
	case pv.Spec.Local != nil:
		p := filepath.Clean(pv.Spec.Local.Path)
		st, err := os.Stat(p)
		if err != nil {
			return "", fmt.Errorf("local volume %s: %w: whoever made the PersistentVolume makes the folder, too", pv.Name, err)
		}
		if !st.IsDir() {
			return "", fmt.Errorf("local volume %s: %s is not a folder", pv.Name, p)
		}
		return p, v.own(p, -1, pod, st)
	case pv.Spec.HostPath != nil:
		return hostPath(pv.Spec.HostPath)
	}
	return "", fmt.Errorf("volume %s is of a type that no node mounts", pv.Name)
}

// localName checks that a volume's name can name a folder here.
func localName(name string) error {
	if name == "" || strings.HasPrefix(name, ".") || strings.ContainsAny(name, "/\x00") {
		return fmt.Errorf("volume name %q cannot name a folder", name)
	}
	return nil
}

// local makes the folder of a volume of the built-in class at its first use,
// or takes it as it is. The folder around all of them is the agent's alone, so
// its own mode says who of a pod's users may write, and nobody else gets in.
func (v *Volumes) local(pod *corev1.Pod, pv *corev1.PersistentVolume, f Facts) (string, error) {
	if err := localName(pv.Name); err != nil {
		return "", err
	}
	if pv.DeletionTimestamp != nil {
		return "", fmt.Errorf("volume %s is being deleted", pv.Name)
	}
	v.making.Lock()
	defer v.making.Unlock()
	if err := os.MkdirAll(v.c.ClaimsDir, 0o700); err != nil {
		return "", fmt.Errorf("volumes of claims: %w", err)
	}
	p := filepath.Join(v.c.ClaimsDir, pv.Name)
	err := os.Mkdir(p, 0o777)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("volume %s: %w", pv.Name, err)
	}
	if err == nil {
		if err := os.Chmod(p, 0o777); err != nil { // the umask took some of it
			return "", fmt.Errorf("volume %s: %w", pv.Name, err)
		}
		if err := syncDir(v.c.ClaimsDir); err != nil {
			return "", fmt.Errorf("volume %s: %w", pv.Name, err)
		}
	}
	size := pv.Spec.Capacity[corev1.ResourceStorage]
	if v.c.Limited != nil {
		v.c.Limited(pv, limitFolder(v.c.ClaimsDir, p, size.Value()))
	}
	st, err := os.Lstat(p)
	if err != nil {
		return "", fmt.Errorf("volume %s: %w", pv.Name, err)
	}
	if !st.IsDir() {
		return "", fmt.Errorf("volume %s: %s is not a folder", pv.Name, p)
	}
	return p, v.own(p, f.UID, pod, st)
}

// own gives a volume's files to the pod's group (fsGroup), and those of a
// pod whose guests have a uid of their own to that.
func (v *Volumes) own(p string, uid int, pod *corev1.Pod, st os.FileInfo) error {
	group := fsGroup(pod)
	if !v.root || group == nil && uid < 0 {
		return nil
	}
	sc := pod.Spec.SecurityContext
	if sc != nil && sc.RunAsUser != nil {
		uid = -1
	}
	hasUID, hasGID := ownerOf(st)
	rootFits := (uid < 0 || hasUID == uid) && (group == nil || hasGID == int(*group) && st.Mode()&os.ModeSetgid != 0)
	always := group != nil && (sc.FSGroupChangePolicy == nil || *sc.FSGroupChangePolicy == corev1.FSGroupChangeAlways)
	if rootFits && !always {
		return nil
	}
	gid := -1
	if group != nil {
		gid = int(*group)
	}
	key := ownedKey{string(pod.UID), p}
	if _, done := v.owned.Load(key); done && rootFits {
		return nil // not again each time that a ConfigMap of the pod changes
	}
	// The folder itself comes last: it says that all below it is done.
	err := filepath.WalkDir(p, func(at string, d fs.DirEntry, err error) error {
		if err != nil || at == p {
			return err
		}
		return change(at, d, uid, gid)
	})
	if err != nil {
		return fmt.Errorf("owner of the volume's files: %w", err)
	}
	if err := change(p, fs.FileInfoToDirEntry(st), uid, gid); err != nil {
		return fmt.Errorf("owner of the volume: %w", err)
	}
	v.owned.Store(key, true)
	return nil
}

// ownedKey names a volume as a pod has it.
type ownedKey struct{ pod, path string }

// change sets owner and, for a group, its rights. Links are not followed.
func change(at string, d fs.DirEntry, uid, gid int) error {
	if err := os.Lchown(at, uid, gid); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it may go meanwhile
		}
		return err
	}
	if gid < 0 || d.Type()&fs.ModeSymlink != 0 {
		return nil
	}
	st, err := os.Lstat(at)
	if err != nil {
		return err
	}
	mode := st.Mode().Perm() | 0o660
	if st.IsDir() {
		mode |= 0o110 | os.ModeSetgid
	} else if !st.Mode().IsRegular() {
		return nil
	}
	return os.Chmod(at, mode)
}

// removing is what a volume's folder is called while it is removed: a new one
// of the name is never half an old one.
const removing = ".removing-"

// RemoveLocal removes the data of a volume of the built-in class. It is
// idempotent, and done when it returns without an error.
func (v *Volumes) RemoveLocal(_ context.Context, name string) error {
	if err := localName(name); err != nil {
		return err
	}
	root, err := os.OpenRoot(v.c.ClaimsDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove volume %s: %w", name, err)
	}
	defer func() { _ = root.Close() }()
	remove := func(name string) error {
		if st, err := root.Lstat(name); err == nil && st.IsDir() {
			if err := v.unmountAll(filepath.Join(v.c.ClaimsDir, name)); err != nil {
				return err
			}
		}
		return root.RemoveAll(name)
	}
	if err := root.Rename(name, removing+name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		// What an earlier try left stands in the way.
		if err := remove(removing + name); err != nil {
			return fmt.Errorf("remove volume %s: %w", name, err)
		}
		if err := root.Rename(name, removing+name); err != nil {
			return fmt.Errorf("remove volume %s: %w", name, err)
		}
	}
	if err := remove(removing + name); err != nil {
		return fmt.Errorf("remove volume %s: %w", name, err)
	}
	if err := syncDir(v.c.ClaimsDir); err != nil {
		return fmt.Errorf("remove volume %s: %w", name, err)
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return d.Sync()
}
