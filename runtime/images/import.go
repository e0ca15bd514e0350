package images

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Annotations by which archives name their images.
const (
	containerdName = "io.containerd.image.name"
	ociRefName     = "org.opencontainers.image.ref.name"
	// By which cosign save tells an image from what belongs to it.
	cosignKind  = "kind"
	cosignImage = "dev.cosignproject.cosign/image"
)

// Imported is one image of an archive.
type Imported struct {
	Names  []string // by which pods find it
	Digest string
	Module bool // it is a WebAssembly module
	// Signature: it is no image but the signatures of the one with that digest.
	Signature bool
	Size      int64
}

// candidate is an image of an archive that is not kept yet.
type candidate struct {
	digest string
	names  []string
	beside bool // signatures and the like of another one
}

// Import reads a tar in the OCI layout or of docker save, compressed or not,
// and keeps the images in it that this machine can run, under the names that
// the archive gives, or under name when that is not empty. Until an image is
// whole and unpacked its names mean what they meant before. Collect never
// takes what was imported.
func (s *Store) Import(ctx context.Context, name string, r io.Reader, progress workload.Progress) ([]Imported, error) {
	if progress == nil {
		progress = func(string) {}
	}
	if name != "" {
		ref, err := ParseRef(name)
		if err != nil {
			return nil, err
		}
		name = ref.Name()
	}
	a, done, err := s.spool(ctx, r)
	if err != nil {
		return nil, err
	}
	defer done()
	unlock, err := s.lock(unix.LOCK_SH)
	if err != nil {
		return nil, err
	}
	defer unlock()
	var found []candidate
	_, oci := a.file("index.json")
	if _, layout := a.file("oci-layout"); oci && layout {
		found, err = a.layout()
	} else {
		found, err = s.dockerArchive(a)
	}
	if err != nil {
		return nil, err
	}
	if err := applyName(found, name); err != nil {
		return nil, err
	}
	var out []Imported
	for _, c := range found {
		got, err := s.take(ctx, a, c, progress)
		if err != nil {
			return out, err
		}
		out = append(out, got)
	}
	return out, nil
}

// applyName gives the one image of an archive the name that was asked for.
func applyName(found []candidate, name string) error {
	if len(found) == 0 {
		return notArchive("there is no image in it")
	}
	if name == "" {
		return nil
	}
	images := slices.DeleteFunc(slices.Clone(found), func(c candidate) bool { return c.beside })
	if len(images) != 1 {
		return &workload.StartError{Reason: ReasonInvalidName, Message: fmt.Sprintf("the archive has %d images, so one name cannot be given to it", len(images)),
			Hint: "import it without a name"}
	}
	for i := range found {
		if !found[i].beside {
			found[i].names = []string{name}
		}
	}
	return nil
}

// layout lists the images of an OCI layout.
func (a *archive) layout() ([]candidate, error) {
	var ix v1.IndexManifest
	if err := a.decode("index.json", &ix); err != nil {
		return nil, err
	}
	var out []candidate
	at := map[string]int{}
	for i := range ix.Manifests {
		d := &ix.Manifests[i]
		digest := d.Digest.String()
		if !validDigest(digest) {
			return nil, notArchive("index.json names the digest %q", digest)
		}
		n, seen := at[digest]
		if !seen {
			n = len(out)
			at[digest] = n
			kind := d.Annotations[cosignKind]
			out = append(out, candidate{digest: digest, beside: kind != "" && kind != cosignImage})
		}
		full := d.Annotations[containerdName]
		if tag := d.Annotations[ociRefName]; full == "" && strings.ContainsAny(tag, "/:") {
			full = tag // a bare tag names nothing
		}
		if full == "" {
			continue
		}
		ref, err := ParseRef(full)
		if err != nil {
			return nil, err
		}
		out[n].names = append(out[n].names, ref.Name())
	}
	return out, nil
}

// dockerArchive gives the images of docker save a manifest.
func (s *Store) dockerArchive(a *archive) ([]candidate, error) {
	var list []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := a.decode("manifest.json", &list); err != nil {
		return nil, err
	}
	var out []candidate
	for _, e := range list {
		conf, ok := a.file(e.Config)
		if !ok {
			return nil, notArchive("the config %q is missing", e.Config)
		}
		m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: descriptor(conf, types.OCIConfigJSON)}
		for _, l := range e.Layers {
			f, ok := a.file(l)
			if !ok {
				return nil, notArchive("the layer %q is missing", l)
			}
			m.Layers = append(m.Layers, descriptor(f, layerType(f)))
		}
		raw, err := json.Marshal(&m)
		if err != nil {
			return nil, fmt.Errorf("import: %w", err)
		}
		c := candidate{}
		if c.digest, err = s.putBlob(raw); err != nil {
			return nil, fmt.Errorf("import: %w", err)
		}
		for _, t := range e.RepoTags {
			ref, err := ParseRef(t)
			if err != nil {
				return nil, err
			}
			c.names = append(c.names, ref.Name())
		}
		out = append(out, c)
	}
	return out, nil
}

func descriptor(f spooled, t types.MediaType) v1.Descriptor {
	return v1.Descriptor{MediaType: t, Size: f.size, Digest: v1.Hash{Algorithm: "sha256", Hex: hexOf(f.digest)}}
}

// layerType looks at a layer's first bytes.
func layerType(f spooled) types.MediaType {
	file, err := os.Open(f.path)
	if err != nil {
		return types.OCIUncompressedLayer
	}
	defer func() { _ = file.Close() }()
	var magic [4]byte
	_, _ = io.ReadFull(file, magic[:])
	switch {
	case magic[0] == 0x1f && magic[1] == 0x8b:
		return types.OCILayer
	case magic == [4]byte{0x28, 0xb5, 0x2f, 0xfd}:
		return types.OCILayerZStd
	}
	return types.OCIUncompressedLayer
}

// take keeps an image of the archive: blobs, then layers, then names.
func (s *Store) take(ctx context.Context, a *archive, c candidate, progress workload.Progress) (Imported, error) {
	label := c.digest
	if len(c.names) > 0 {
		label = c.names[0]
	}
	raw, err := s.manifestFor(label, c.digest, false, func(d v1.Descriptor) ([]byte, error) {
		b, err := s.describing(a, d.Digest.String(), maxManifest)
		if err == nil {
			_, err = s.putBlob(b)
		}
		return b, err
	})
	if err != nil {
		return Imported{}, incomplete(label, err)
	}
	m, err := parseManifest(label, raw)
	if err != nil {
		return Imported{}, err
	}
	if isSignature(m) {
		digest, err := s.takeSignatures(a, m)
		return Imported{Digest: digest, Signature: true}, incomplete(label, err)
	}
	for _, d := range append([]v1.Descriptor{m.Config}, m.Layers...) {
		if err := s.takeBlob(a, d); err != nil {
			return Imported{}, incomplete(label, err)
		}
	}
	r, err := s.describe(label, c.digest, moduleOf(m) != notModule)
	if err != nil {
		return Imported{}, err
	}
	out := Imported{Names: c.names, Digest: c.digest, Module: r.config == nil, Size: r.size()}
	if !out.Module {
		progress("unpacking " + label)
		if _, err := s.open(ctx, r); err != nil {
			return Imported{}, err
		}
	}
	now := s.cfg.Clock.Now().UTC()
	if len(c.names) == 0 {
		c.names = []string{c.digest}
	}
	for _, n := range c.names {
		if err := s.writeName(nameRecord{Name: n, Digest: c.digest, Imported: true, AddedAt: now, LastUsedAt: now}); err != nil {
			return Imported{}, err
		}
	}
	return out, nil
}

func incomplete(label string, err error) error {
	if errors.Is(err, errMissing) {
		return notArchive("of image %s: %v", label, err)
	}
	return err
}

// describing reads a small blob of the archive, or of the store.
func (s *Store) describing(a *archive, digest string, limit int64) ([]byte, error) {
	if f, ok := a.digests[digest]; ok {
		if _, err := os.Stat(f.path); err == nil {
			return f.small(limit)
		}
	}
	return s.readBlob(digest, limit)
}

// takeBlob moves a blob from the archive to the store.
func (s *Store) takeBlob(a *archive, d v1.Descriptor) error {
	digest := d.Digest.String()
	f, ok := a.digests[digest]
	if ok {
		if _, err := os.Stat(f.path); err != nil {
			ok = false // another image of the archive has taken it
		}
	}
	switch {
	case !ok && s.hasBlob(digest, d.Size):
		return nil
	case !ok:
		return fmt.Errorf("blob %s is neither in the archive nor %w", digest, errMissing)
	case f.size != d.Size:
		return notArchive("blob %s has %d bytes, and its image says %d", digest, f.size, d.Size)
	}
	file, err := os.Open(f.path)
	if err != nil {
		return fmt.Errorf("import: %w", err)
	}
	defer func() { _ = file.Close() }()
	return s.keepBlob(file, digest)
}
