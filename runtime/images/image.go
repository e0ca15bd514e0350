package images

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Limits of what describes an image. Registries take manifests of 4 MiB.
const (
	maxManifest = 4 << 20
	maxConfig   = 8 << 20
	maxLayers   = 500 // what overlayfs takes (OVL_MAX_STACK)
	maxNesting  = 4   // indexes in indexes
)

// RunConfig is what an image says about running it.
type RunConfig struct {
	User         string
	Env          []string
	Entrypoint   []string
	Cmd          []string
	WorkingDir   string
	StopSignal   string
	ExposedPorts []string // "80/tcp", sorted
	Volumes      []string // sorted
	Labels       map[string]string
}

// Image is one that is here, unpacked, and was verified.
type Image struct {
	Name     string // what it was looked up by
	Digest   string // what the name means: of the index, if there is one
	Manifest string // digest of this platform's manifest
	Platform Platform
	Config   RunConfig
	// LayerDir holds the unpacked layers; Layers are names of folders in it,
	// the uppermost first, as overlayfs wants them in lowerdir. They are in
	// overlayfs's own form: whiteouts are devices 0/0, opaque folders have
	// trusted.overlay.opaque. The names are short, and lowerdir can be relative
	// to LayerDir, since mount(2) takes one page of options. Read only.
	LayerDir string
	Layers   []string
	Size     int64 // bytes of blobs
}

// resolved is an image's description, from its blobs.
type resolved struct {
	name, digest string
	manifest     v1.Hash
	m            *v1.Manifest
	config       *v1.ConfigFile // nil for a module
	rawConfig    []byte
	diffIDs      []string
}

// describe reads what name means from blobs that are here. With wasm it is a
// module's artifact, whatever form that has, and its config is not looked at.
func (s *Store) describe(name, digest string, wasm bool) (*resolved, error) {
	r := &resolved{name: name, digest: digest}
	raw, err := s.manifestFor(name, digest, wasm, func(d v1.Descriptor) ([]byte, error) { return s.readBlob(d.Digest.String(), maxManifest) })
	if err != nil {
		return nil, err
	}
	if r.m, err = parseManifest(name, raw); err != nil {
		return nil, err
	}
	if r.manifest, err = v1.NewHash(digestOf(raw)); err != nil {
		return nil, fmt.Errorf("image %s: %w", name, err)
	}
	if r.rawConfig, err = s.readBlob(r.m.Config.Digest.String(), maxConfig); err != nil {
		return nil, err
	}
	if wasm || moduleOf(r.m) != notModule {
		return r, nil
	}
	if err := r.readConfig(s.cfg.Platform); err != nil {
		return nil, err
	}
	return r, nil
}

// manifestFor follows indexes to the manifest for this platform; get reads
// one document, of which the digest was checked.
func (s *Store) manifestFor(name, digest string, wasm bool, get func(v1.Descriptor) ([]byte, error)) ([]byte, error) {
	h, err := v1.NewHash(digest)
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", name, err)
	}
	d := v1.Descriptor{Digest: h, Size: -1}
	for range maxNesting {
		raw, err := get(d)
		if err != nil {
			return nil, err
		}
		if !isIndex(raw) {
			return raw, nil
		}
		ix, err := v1.ParseIndexManifest(bytes.NewReader(raw))
		if err != nil {
			return nil, badImage(name, "its index cannot be read: %v", err)
		}
		if d, err = choose(name, ix, s.cfg.Platform, wasm); err != nil {
			return nil, err
		}
	}
	return nil, badImage(name, "indexes are nested more than %d deep", maxNesting)
}

// isIndex looks at the document itself: media types are often missing.
func isIndex(raw []byte) bool {
	var m struct {
		MediaType types.MediaType `json:"mediaType"`
		Manifests json.RawMessage `json:"manifests"`
		Layers    json.RawMessage `json:"layers"`
	}
	if json.Unmarshal(raw, &m) != nil {
		return false
	}
	return m.MediaType.IsIndex() || m.MediaType == "" && m.Manifests != nil && m.Layers == nil
}

func parseManifest(name string, raw []byte) (*v1.Manifest, error) {
	m, err := v1.ParseManifest(bytes.NewReader(raw))
	if err != nil {
		return nil, badImage(name, "its manifest cannot be read: %v", err)
	}
	switch {
	case m.SchemaVersion == 1:
		return nil, badImage(name, "its manifest has schema version 1, which registries dropped in 2020: push it again")
	case !validDigest(m.Config.Digest.String()):
		return nil, badImage(name, "its manifest names no config")
	case len(m.Layers) > maxLayers:
		return nil, badImage(name, "it has %d layers, and overlayfs takes no more than %d", len(m.Layers), maxLayers)
	}
	for _, l := range m.Layers {
		switch {
		case !validDigest(l.Digest.String()):
			return nil, badImage(name, "layer digest %q is not sha256: and 64 hexadecimal digits", l.Digest.String())
		case l.Size < 0:
			return nil, badImage(name, "layer %s has size %d", l.Digest, l.Size)
		case len(l.URLs) > 0 || !l.MediaType.IsDistributable():
			return nil, badImage(name, "layer %s is not in the registry (%s)", l.Digest, l.MediaType)
		}
	}
	return m, nil
}

func badImage(name, format string, args ...any) error {
	return &workload.StartError{Reason: ReasonPull, Message: fmt.Sprintf("image %s: ", name) + fmt.Sprintf(format, args...)}
}

// readConfig checks the config of a container image against the manifest and
// this machine.
func (r *resolved) readConfig(p Platform) error {
	c, err := v1.ParseConfigFile(bytes.NewReader(r.rawConfig))
	if err != nil {
		return badImage(r.name, "its config (%s) cannot be read: %v", r.m.Config.MediaType, err)
	}
	offer := Platform{c.OS, c.Architecture, c.Variant}
	if c.OS == "" || c.Architecture == "" {
		return badImage(r.name, "it is no container image (config of type %s says no platform)", r.m.Config.MediaType)
	}
	if p.rank(offer) < 0 {
		return wrongPlatform(r.name, []string{offer.String()}, p)
	}
	if len(c.RootFS.DiffIDs) != len(r.m.Layers) {
		return badImage(r.name, "its config names %d layers and its manifest %d", len(c.RootFS.DiffIDs), len(r.m.Layers))
	}
	for _, d := range c.RootFS.DiffIDs {
		if !validDigest(d.String()) {
			return badImage(r.name, "diff id %q is not sha256: and 64 hexadecimal digits", d.String())
		}
		r.diffIDs = append(r.diffIDs, d.String())
	}
	r.config = c
	return nil
}

func (r *resolved) runConfig() RunConfig {
	c := &r.config.Config
	return RunConfig{
		User: c.User, Env: c.Env, Entrypoint: c.Entrypoint, Cmd: c.Cmd, WorkingDir: c.WorkingDir, StopSignal: c.StopSignal,
		ExposedPorts: slices.Sorted(maps.Keys(c.ExposedPorts)), Volumes: slices.Sorted(maps.Keys(c.Volumes)), Labels: c.Labels,
	}
}

func (r *resolved) size() int64 {
	n := r.m.Config.Size
	for i := range r.m.Layers {
		n += r.m.Layers[i].Size
	}
	return n
}

// Lookup returns the image that name means, or, when name is empty, the one
// with that digest, from what is here alone. Blobs that describe it are
// verified, layers are compared with what was unpacked, once in the life of
// the process, and unpacked again from their blob when they differ. A
// *workload.StartError with reason ErrImageNeverPull says that it is not here.
func (s *Store) Lookup(ctx context.Context, name, digest string) (*Image, error) {
	if name != "" && digest == "" {
		ref, err := ParseRef(name)
		if err != nil {
			return nil, err
		}
		rec, ok := s.readName(ref.Name())
		if !ok && ref.Digest != "" {
			rec, ok = nameRecord{Name: name, Digest: ref.Digest}, true
		}
		if !ok {
			return nil, notHere(name, nil)
		}
		digest = rec.Digest
	}
	if name == "" {
		name = digest
	}
	r, err := s.describe(name, digest, false)
	if errors.Is(err, errMissing) {
		return nil, notHere(name, err)
	}
	if err != nil {
		return nil, err
	}
	if r.config == nil {
		return nil, badImage(name, "it is a WebAssembly module, not a container image: set runtimeClassName: wasm")
	}
	return s.open(ctx, r)
}

func notHere(name string, err error) error {
	return &workload.StartError{Reason: ReasonNeverPull, Err: err,
		Message: fmt.Sprintf("image %s is not on this node and imagePullPolicy is Never", name),
		Hint:    "bring it with `dunlin import FILE`, or use IfNotPresent"}
}

// open unpacks what is not unpacked yet.
func (s *Store) open(ctx context.Context, r *resolved) (*Image, error) {
	img := &Image{Name: r.name, Digest: r.digest, Manifest: r.manifest.String(), Config: r.runConfig(), LayerDir: s.path("l"), Size: r.size(),
		Platform: Platform{r.config.OS, r.config.Architecture, r.config.Variant}}
	blobs := make([]string, len(r.m.Layers))
	for i := range r.m.Layers {
		blobs[i] = r.m.Layers[i].Digest.String()
	}
	dirs, err := s.layers(ctx, r.diffIDs, blobs)
	if errors.Is(err, errMissing) {
		return nil, notHere(r.name, err)
	}
	if err != nil {
		return nil, unusable(r.name, err)
	}
	img.Layers = dirs
	slices.Reverse(img.Layers)
	return img, nil
}

func unusable(image string, err error) error {
	var se *workload.StartError
	if errors.As(err, &se) || errors.Is(err, context.Canceled) {
		return err
	}
	out := &workload.StartError{Reason: ReasonPull, Err: err, Message: fmt.Sprintf("image %s: %v", image, err)}
	var space *SpaceError
	if errors.As(err, &space) {
		out.Hint = "remove what is not needed (dunlin images), or give the node a larger disk"
	}
	return out
}
