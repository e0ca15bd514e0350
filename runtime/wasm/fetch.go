package wasm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/runtime/images"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// fetch takes a module over from where images are kept.
func (s *Store) fetch(ctx context.Context, req workload.ImageRequest, ready Ready, progress workload.Progress) (workload.ImageState, error) {
	if s.fetcher == nil || !images.NamesRegistry(req.Image) {
		return workload.ImageState{}, notHere(req)
	}
	m, err := s.fetcher.Module(ctx, req, progress)
	if err != nil {
		return workload.ImageState{}, err
	}
	if m.Content != "" {
		st, err := s.link(ctx, m, ready)
		if !errors.Is(err, errDamaged) || req.Policy == "Never" {
			return st, err
		}
		// What a disk lost is fetched again.
		if to, qerr := atomicfile.Quarantine(m.File); qerr == nil {
			s.log.Warn("damaged module set aside", "digest", m.Content, "to", to)
		}
		if m, err = s.fetcher.Module(ctx, req, progress); err != nil {
			return st, err
		}
		return s.link(ctx, m, ready)
	}
	// One that was taken out of its image before is known by a name of ours.
	taken := takenName(m.Digest)
	if r, ok := s.readName(taken); ok {
		if st, err := s.usable(ctx, r.Digest, ""); err == nil {
			return st, nil
		}
	}
	r, err := m.Open()
	if err != nil {
		return workload.ImageState{}, err
	}
	defer func() { _ = r.Close() }()
	st, err := s.take(ctx, r, ready)
	if err != nil {
		return st, err
	}
	return st, s.writeName(nameRecord{Name: taken, Digest: st.Digest, Size: st.Size, ImportedAt: s.clock.Now().UTC()})
}

// takenPrefix begins names that no image can have.
const takenPrefix = "@image:"

func takenName(digest string) string { return takenPrefix + digest }

func notHere(req workload.ImageRequest) error {
	name, _, _ := strings.Cut(req.Image, "@")
	if req.Policy == "Never" {
		return &workload.StartError{Reason: ReasonNeverPull,
			Message: fmt.Sprintf("module %s is not on this node and imagePullPolicy is Never", req.Image), Hint: "import it with `dunlin import " + name + " FILE`"}
	}
	return &workload.StartError{Reason: ReasonPull,
		Message: fmt.Sprintf("module %s is not on this node, and its name begins with no registry to get it from", req.Image),
		Hint:    fmt.Sprintf("run `dunlin import %s FILE` on the node, or use image: REGISTRY/NAME:TAG or file:///path/to/app.wasm", name)}
}

// link gives a module that is kept as it is elsewhere a second name here, not
// a second copy.
func (s *Store) link(ctx context.Context, m images.Module, ready Ready) (st workload.ImageState, err error) {
	if st, err := s.usable(ctx, m.Content, ""); err == nil {
		return st, nil
	}
	f, err := openRegular(m.File)
	if err != nil {
		return st, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return st, fmt.Errorf("module: %w", err)
	}
	if info.Size() > s.maxBytes {
		return st, tooLarge(s.maxBytes, errTooLarge)
	}
	got, err := digestOf(ctx, f)
	if err != nil {
		return st, err
	}
	if got != m.Content {
		return st, &workload.StartError{Reason: ReasonDamaged, Err: errDamaged, Message: fmt.Sprintf("module %s on this node is damaged: it reads as %s", m.Content, got),
			Hint: "remove the image with `dunlin images rm` to have it pulled again, and check the disk"}
	}
	if _, err := Inspect(f, info.Size()); err != nil {
		return st, unfit(err)
	}
	if ready != nil {
		if err := ready(m.Content, func() (*os.File, error) { return os.Open(m.File) }); err != nil {
			return st, err
		}
	}
	err = os.Link(m.File, s.BlobPath(m.Content))
	if errors.Is(err, syscall.EXDEV) || errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EMLINK) {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return st, fmt.Errorf("module: %w", err)
		}
		return s.take(ctx, f, nil)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return st, fmt.Errorf("module: %w", err)
	}
	s.forgetDamaged(m.Content)
	return workload.ImageState{Digest: m.Content, Size: info.Size()}, atomicfile.SyncDir(s.blobs())
}
