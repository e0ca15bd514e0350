package volumes

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// file is one file of a projected volume.
type file struct {
	data  []byte
	mode  *int32
	token bool // readable by its owner alone
}

type fileSet map[string]file

func (s fileSet) add(path string, f file) error {
	if path == "" || filepath.IsAbs(path) || path != filepath.Clean(path) || strings.HasPrefix(path, "..") {
		return fmt.Errorf("path %q must be relative and inside the volume, and must not start with \"..\"", path)
	}
	s[path] = f
	return nil
}

// pick chooses items of data, or all of it.
func (s fileSet) pick(data map[string][]byte, items []corev1.KeyToPath, optional bool, missing func(key string) error) error {
	if len(items) == 0 {
		for k, d := range data {
			if err := s.add(k, file{data: d}); err != nil {
				return err
			}
		}
		return nil
	}
	for _, it := range items {
		d, ok := data[it.Key]
		if !ok {
			if optional {
				continue
			}
			return missing(it.Key)
		}
		if err := s.add(it.Path, file{data: d, mode: it.Mode}); err != nil {
			return err
		}
	}
	return nil
}

func isTrue(b *bool) bool { return b != nil && *b }

func configMapFiles(ns string, ref corev1.LocalObjectReference, items []corev1.KeyToPath, optional *bool, src Source) (fileSet, error) {
	files := fileSet{}
	cm, ok := src.ConfigMap(ns, ref.Name)
	if !ok {
		if isTrue(optional) {
			return files, nil
		}
		return nil, &MissingError{Kind: "ConfigMap", Namespace: ns, Name: ref.Name}
	}
	data := maps.Clone(cm.BinaryData)
	if data == nil {
		data = map[string][]byte{}
	}
	for k, v := range cm.Data {
		data[k] = []byte(v)
	}
	return files, files.pick(data, items, isTrue(optional), func(key string) error {
		return &MissingError{Kind: "ConfigMap", Namespace: ns, Name: ref.Name, Key: key}
	})
}

func secretFiles(ns string, ref corev1.LocalObjectReference, items []corev1.KeyToPath, optional *bool, src Source) (fileSet, error) {
	files := fileSet{}
	s, ok := src.Secret(ns, ref.Name)
	if !ok {
		if isTrue(optional) {
			return files, nil
		}
		return nil, &MissingError{Kind: "Secret", Namespace: ns, Name: ref.Name}
	}
	return files, files.pick(s.Data, items, isTrue(optional), func(key string) error {
		return &MissingError{Kind: "Secret", Namespace: ns, Name: ref.Name, Key: key}
	})
}

func downwardFiles(pod *corev1.Pod, items []corev1.DownwardAPIVolumeFile, f Facts) (fileSet, error) {
	files := fileSet{}
	for _, it := range items {
		var v string
		var err error
		switch {
		case it.FieldRef != nil:
			v, err = Field(pod, it.FieldRef.FieldPath, f)
		case it.ResourceFieldRef != nil:
			v, err = Resource(pod, "", it.ResourceFieldRef, f)
		default:
			err = errors.New("neither fieldRef nor resourceFieldRef")
		}
		if err == nil {
			err = files.add(it.Path, file{data: []byte(v), mode: it.Mode})
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", it.Path, err)
		}
	}
	return files, nil
}

// projectedFiles joins the sources; secret says that some of it must not
// reach the disk. A token that the node does not have is left out: a known
// pod must start with no server to ask for one.
func projectedFiles(pod *corev1.Pod, p *corev1.ProjectedVolumeSource, src Source, f Facts) (all fileSet, secret bool, err error) {
	all = fileSet{}
	for i := range p.Sources {
		s := &p.Sources[i]
		var part fileSet
		switch {
		case s.ConfigMap != nil:
			part, err = configMapFiles(pod.Namespace, s.ConfigMap.LocalObjectReference, s.ConfigMap.Items, s.ConfigMap.Optional, src)
		case s.Secret != nil:
			secret = true
			part, err = secretFiles(pod.Namespace, s.Secret.LocalObjectReference, s.Secret.Items, s.Secret.Optional, src)
		case s.DownwardAPI != nil:
			part, err = downwardFiles(pod, s.DownwardAPI.Items, f)
		case s.ServiceAccountToken != nil:
			secret, part = true, fileSet{}
			if token, ok := src.Token(pod, s.ServiceAccountToken); ok {
				err = part.add(s.ServiceAccountToken.Path, file{data: []byte(token), token: true})
			}
		default:
			err = errors.New("this kind of projected source is not supported by this node")
		}
		if err != nil {
			return nil, false, err
		}
		maps.Copy(all, part)
	}
	return all, secret, nil
}

const (
	dataLink = "..data"
	dataNew  = "..data_tmp"
)

// project writes the files so that a reader sees either all of the old or
// all of the new: a new folder, then one rename of the ..data link.
func (v *Volumes) project(pod *corev1.Pod, name, base string, files fileSet, facts Facts, defaultMode *int32) (string, error) {
	p, err := v.dir(base, pod, name)
	if err != nil {
		return "", err
	}
	if err := os.Mkdir(p, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	root, err := os.OpenRoot(p)
	if err != nil {
		return "", err
	}
	defer func() { _ = root.Close() }()
	w := writer{root: root, mode: 0o644}
	if defaultMode != nil {
		w.mode = *defaultMode
	}
	w.uid, w.gid = v.owner(pod, facts)
	w.group = fsGroup(pod) != nil && v.root
	old, _ := root.Readlink(dataLink)
	if old != "" && w.same(old, files) {
		return p, nil
	}
	if err := w.replace(old, files); err != nil {
		return "", fmt.Errorf("write files: %w", err)
	}
	return p, nil
}

type writer struct {
	root     *os.Root
	mode     int32
	uid, gid int
	group    bool
}

func (w *writer) perm(f file) fs.FileMode {
	m := w.mode
	if f.mode != nil {
		m = *f.mode
	}
	if f.token {
		m = 0o600
	}
	if w.group {
		m |= 0o440
	}
	return fs.FileMode(m) & fs.ModePerm
}

// same says whether the folder holds exactly these files.
func (w *writer) same(dir string, files fileSet) bool {
	n := 0
	err := fs.WalkDir(w.root.FS(), dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		n++
		rel := strings.TrimPrefix(path, dir+"/")
		f, ok := files[rel]
		if !ok {
			return fs.ErrNotExist
		}
		st, err := d.Info()
		if err != nil || st.Size() != int64(len(f.data)) || st.Mode().Perm() != w.perm(f) {
			return fs.ErrInvalid
		}
		data, err := w.root.ReadFile(path)
		if err != nil || !bytes.Equal(data, f.data) {
			return fs.ErrInvalid
		}
		return nil
	})
	return err == nil && n == len(files)
}

func (w *writer) replace(old string, files fileSet) error {
	dir := "..0"
	if n, err := strconv.Atoi(strings.TrimPrefix(old, "..")); err == nil {
		dir = ".." + strconv.Itoa(n+1)
	}
	if err := w.root.RemoveAll(dir); err != nil { // left by a crash
		return err
	}
	if err := w.root.Mkdir(dir, 0o755); err != nil {
		return err
	}
	for path, f := range files {
		if err := w.write(filepath.Join(dir, path), f); err != nil {
			return err
		}
	}
	_ = w.root.Remove(dataNew)
	if err := w.root.Symlink(dir, dataNew); err != nil {
		return err
	}
	if err := w.root.Rename(dataNew, dataLink); err != nil {
		return err
	}
	if err := w.links(files); err != nil {
		return err
	}
	if old != "" && old != dir && strings.HasPrefix(old, "..") && !strings.Contains(old, "/") {
		return w.root.RemoveAll(old)
	}
	return nil
}

func (w *writer) write(path string, f file) error {
	if err := w.root.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := w.root.WriteFile(path, f.data, 0o600); err != nil {
		return err
	}
	if w.uid >= 0 || w.gid >= 0 {
		if err := w.root.Lchown(path, w.uid, w.gid); err != nil {
			return err
		}
	}
	return w.root.Chmod(path, w.perm(f))
}

// links points each top-level name at ..data, and removes names that went.
func (w *writer) links(files fileSet) error {
	want := map[string]bool{}
	for path := range files {
		top, _, _ := strings.Cut(path, "/")
		want[top] = true
	}
	entries, err := fs.ReadDir(w.root.FS(), ".")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "..") {
			continue
		}
		if !want[e.Name()] {
			if err := w.root.RemoveAll(e.Name()); err != nil {
				return err
			}
		}
		delete(want, e.Name())
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if err := w.root.Symlink(filepath.Join(dataLink, name), name); err != nil {
			return err
		}
	}
	return nil
}
