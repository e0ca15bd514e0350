// Package static reads the folder of static pods: pods that run on this node
// because a file says so, with or without a control plane, which sees them
// as mirror objects.
//
// Owner: the agent's loop calls Pods again and again; a file is read only
// when its time, size or inode changed. No goroutine, no watch. A pod's UID
// comes from node, file and content, so that the same file is the same pod
// after a restart and an edited file is a new one. A file that became faulty
// keeps its last good pods running, and says so.
package static

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/manifests"
)

// Bounds.
const (
	maxFile  = 1 << 20
	maxFiles = 256
)

// Annotations that a static pod gets, upstream's names.
const (
	hashAnnotation   = "kubernetes.io/config.hash"
	sourceAnnotation = "kubernetes.io/config.source"
)

// Folder is a folder of manifests.
type Folder struct {
	dir   string
	node  string
	files map[string]*entry
	last  []*corev1.Pod
}

type entry struct {
	stamp stamp
	pods  []*corev1.Pod
	err   error
}

// stamp tells versions of a file apart.
type stamp struct {
	mtime int64
	size  int64
}

// New reads pods of the node from dir, which need not exist.
func New(dir, node string) *Folder {
	return &Folder{dir: dir, node: node, files: map[string]*entry{}}
}

// Pods returns the pods of all good files, in the files' order, and an error
// for each file that is left out. Not safe for concurrent use.
func (f *Folder) Pods() ([]*corev1.Pod, []error) {
	entries, err := os.ReadDir(f.dir)
	if errors.Is(err, fs.ErrNotExist) {
		f.files, f.last = map[string]*entry{}, nil
		return nil, nil
	}
	if err != nil { // not being able to look is no reason to stop pods
		return f.last, []error{fmt.Errorf("static pods: %w", err)}
	}
	var pods []*corev1.Pod
	var errs []error
	seen, names := map[string]bool{}, map[string]string{}
	for _, e := range entries {
		if !isManifest(e.Name()) {
			continue
		}
		if len(seen) == maxFiles {
			errs = append(errs, fmt.Errorf("static pods: more than %d files in %s; the rest is left out", maxFiles, f.dir))
			break
		}
		seen[e.Name()] = true
		en := f.file(e.Name())
		if en.err != nil {
			errs = append(errs, en.err)
		}
		for _, p := range en.pods {
			if other, ok := names[p.Namespace+"/"+p.Name]; ok {
				errs = append(errs, fmt.Errorf("%s: pod %s/%s is already in %s", e.Name(), p.Namespace, p.Name, other))
				continue
			}
			names[p.Namespace+"/"+p.Name] = e.Name()
			pods = append(pods, p)
		}
	}
	for name := range f.files {
		if !seen[name] {
			delete(f.files, name)
		}
	}
	f.last = pods
	return pods, errs
}

func isManifest(name string) bool {
	switch filepath.Ext(name) {
	case ".yaml", ".yml", ".json":
		return !strings.HasPrefix(name, ".")
	}
	return false
}

// file returns what is known of one file, reading it if it changed.
func (f *Folder) file(name string) *entry {
	path := filepath.Join(f.dir, name)
	old := f.files[name]
	if old == nil {
		old = &entry{}
		f.files[name] = old
	}
	st, err := os.Stat(path)
	if err != nil {
		old.err = fmt.Errorf("static pod file: %w", err)
		return old
	}
	now := stamp{st.ModTime().UnixNano(), st.Size()}
	if old.stamp == now {
		return old
	}
	pods, err := f.read(path, st)
	old.stamp, old.err = now, err
	if err == nil {
		old.pods = pods
	}
	return old
}

func (f *Folder) read(path string, st fs.FileInfo) ([]*corev1.Pod, error) {
	if !st.Mode().IsRegular() || st.Size() > maxFile {
		return nil, fmt.Errorf("%s: not a regular file of at most %d bytes", path, maxFile)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("static pod file: %w", err)
	}
	docs, err := manifests.Decode(bytes.NewReader(data), manifests.Options{File: path, MaxDocuments: maxFiles})
	if err != nil {
		return nil, err
	}
	pods := make([]*corev1.Pod, 0, len(docs))
	for i, d := range docs {
		pod, ok := d.Object.(*corev1.Pod)
		if !ok {
			return nil, fmt.Errorf("%s:%d: a static pod file holds Pods only, not %s", path, d.Line, d.Kind.GVK.Kind)
		}
		if err := f.complete(pod, path, d.JSON, i); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, d.Line, err)
		}
		pods = append(pods, pod)
	}
	return pods, nil
}

// complete makes a pod of what the file says, as the API would.
func (f *Folder) complete(pod *corev1.Pod, path string, raw []byte, i int) error {
	if pod.Name == "" {
		return errors.New("metadata.name is required")
	}
	if pod.Namespace == "" {
		pod.Namespace = corev1.NamespaceDefault
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%d\x00%s", f.node, filepath.Base(path), i, raw))
	hash := hex.EncodeToString(sum[:16])
	pod.Name += "-" + f.node
	pod.UID = uid(sum)
	pod.Generation = 1
	pod.Spec.NodeName = f.node
	pod.Status = corev1.PodStatus{}
	if pod.Annotations == nil {
		pod.Annotations = map[string]string{}
	}
	pod.Annotations[hashAnnotation], pod.Annotations[sourceAnnotation] = hash, "file"
	if pod.Spec.RuntimeClassName == nil {
		class := manifests.RuntimeClassOCI
		if manifests.IsWasmPod(&pod.Spec) {
			class = manifests.RuntimeClassWasm
		}
		pod.Spec.RuntimeClassName = &class
	}
	manifests.Default(pod)
	if err := refers(pod); err != nil {
		return err
	}
	if errs := manifests.Validate(pod); len(errs) > 0 {
		return errs.ToAggregate()
	}
	if _, refused := manifests.Unsupported(pod); len(refused) > 0 {
		return refused.ToAggregate()
	}
	return nil
}

// uid is a version 8 UUID made of the hash.
func uid(sum [32]byte) types.UID {
	b := slices.Clone(sum[:16])
	b[6], b[8] = b[6]&0x0f|0x80, b[8]&0x3f|0x80
	return types.UID(fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]))
}

// refers refuses what only the control plane could give: a static pod must
// start without one.
func refers(pod *corev1.Pod) error {
	const say = "a static pod cannot refer to %s: it must start without a control plane"
	for _, v := range pod.Spec.Volumes {
		switch {
		case v.ConfigMap != nil:
			return fmt.Errorf("spec.volumes %q: "+say, v.Name, "a ConfigMap")
		case v.Secret != nil:
			return fmt.Errorf("spec.volumes %q: "+say, v.Name, "a Secret")
		case v.PersistentVolumeClaim != nil:
			return fmt.Errorf("spec.volumes %q: "+say, v.Name, "a PersistentVolumeClaim")
		case v.Projected != nil:
			for _, s := range v.Projected.Sources {
				if s.DownwardAPI == nil {
					return fmt.Errorf("spec.volumes %q: "+say, v.Name, "other objects")
				}
			}
		}
	}
	if sa := pod.Spec.ServiceAccountName; sa != "" {
		return fmt.Errorf("spec.serviceAccountName: "+say, "a ServiceAccount")
	}
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			c := &list[i]
			if len(c.EnvFrom) > 0 {
				return fmt.Errorf("container %q: envFrom: "+say, c.Name, "other objects")
			}
			for _, e := range c.Env {
				if e.ValueFrom != nil && (e.ValueFrom.ConfigMapKeyRef != nil || e.ValueFrom.SecretKeyRef != nil) {
					return fmt.Errorf("container %q: variable %s: "+say, c.Name, e.Name, "other objects")
				}
			}
		}
	}
	return nil
}
