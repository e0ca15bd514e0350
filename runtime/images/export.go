package images

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
)

// Export writes images that are here to w, as one tar in the OCI layout that
// Import, docker load, skopeo and others read. Of an index, what this node has
// is in it: the part for its own platform. Every byte is verified on its way;
// an error leaves an archive that ends in the middle. The error is a
// *workload.StartError with reason ErrImageNeverPull for one that is not here.
func (s *Store) Export(ctx context.Context, w io.Writer, names ...string) error {
	t := tar.NewWriter(w)
	ix := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex}
	if err := addFile(t, "oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	written := map[string]bool{}
	for _, name := range names {
		d, err := s.exportOne(ctx, t, name, written)
		if err != nil {
			return err
		}
		ix.Manifests = append(ix.Manifests, d)
	}
	raw, err := json.Marshal(&ix)
	if err != nil {
		return fmt.Errorf("export: %w", err)
	}
	if err := addFile(t, "index.json", raw); err != nil {
		return err
	}
	if err := t.Close(); err != nil {
		return fmt.Errorf("export: %w", err)
	}
	return nil
}

func (s *Store) exportOne(ctx context.Context, t *tar.Writer, name string, written map[string]bool) (d v1.Descriptor, err error) {
	ref, err := ParseRef(name)
	if err != nil {
		return d, err
	}
	rec, ok := s.readName(ref.Name())
	if !ok && ref.Digest != "" {
		rec, ok = nameRecord{Name: ref.Name(), Digest: ref.Digest}, true
	}
	if !ok {
		return d, fmt.Errorf("export: image %s is not on this node ('dunlin images' lists those that are)", name)
	}
	r, err := s.describe(name, rec.Digest, false)
	if err != nil {
		if r, err = s.describe(name, rec.Digest, true); errors.Is(err, errMissing) {
			return d, notHere(name, err)
		} else if err != nil {
			return d, err
		}
	}
	var top []byte
	if _, err := s.manifestFor(name, rec.Digest, r.config == nil, func(d v1.Descriptor) ([]byte, error) {
		b, err := s.readBlob(d.Digest.String(), maxManifest)
		if err == nil && top == nil {
			top = b
		}
		if err == nil && !written[d.Digest.String()] {
			written[d.Digest.String()] = true
			err = addFile(t, "blobs/sha256/"+d.Digest.Hex, b)
		}
		return b, err
	}); err != nil {
		return d, err
	}
	for _, b := range append([]v1.Descriptor{r.m.Config}, r.m.Layers...) {
		if written[b.Digest.String()] {
			continue
		}
		written[b.Digest.String()] = true
		if err := s.exportBlob(ctx, t, b); err != nil {
			return d, fmt.Errorf("export %s: %w", name, err)
		}
	}
	d = v1.Descriptor{MediaType: types.OCIManifestSchema1, Size: int64(len(top)), Annotations: map[string]string{containerdName: ref.Name(), ociRefName: ref.Name()}}
	if isIndex(top) {
		d.MediaType = types.OCIImageIndex
	}
	if d.Digest, err = v1.NewHash(rec.Digest); err != nil {
		return d, fmt.Errorf("export: %w", err)
	}
	return d, nil
}

// exportBlob copies one blob, verified.
func (s *Store) exportBlob(ctx context.Context, t *tar.Writer, d v1.Descriptor) error {
	f, err := os.Open(s.blobPath(d.Digest.String()))
	if err != nil {
		return fmt.Errorf("blob: %w", err)
	}
	defer func() { _ = f.Close() }()
	if err := t.WriteHeader(&tar.Header{Name: "blobs/sha256/" + d.Digest.Hex, Size: d.Size, Mode: 0o644}); err != nil {
		return fmt.Errorf("blob: %w", err)
	}
	sum := sha256.New()
	if _, err := io.Copy(io.MultiWriter(t, sum), &contextReader{ctx, f}); err != nil {
		return fmt.Errorf("blob %s: %w", d.Digest, err)
	}
	if hex.EncodeToString(sum.Sum(nil)) != d.Digest.Hex {
		s.setAside(s.blobPath(d.Digest.String()), atomicfile.ErrCorrupt)
		return fmt.Errorf("blob %s on this node is damaged", d.Digest)
	}
	return nil
}

func addFile(t *tar.Writer, name string, b []byte) error {
	if err := t.WriteHeader(&tar.Header{Name: name, Size: int64(len(b)), Mode: 0o644}); err != nil {
		return fmt.Errorf("export: %w", err)
	}
	if _, err := t.Write(b); err != nil {
		return fmt.Errorf("export: %w", err)
	}
	return nil
}
