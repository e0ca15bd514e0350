package images

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/dunlin-project/dunlin/runtime/images/registry"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// PullerConfig of a Puller.
type PullerConfig struct {
	Store    *Store
	Registry *registry.Client
	// Pulls is how many images are fetched at once; 0 is 2.
	Pulls int
	// BytesPerSecond bounds all downloads of the node together; 0 does not.
	BytesPerSecond int64
}

// Puller brings images from registries into a store. It is safe for
// concurrent use; pulls of the same image wait for each other.
type Puller struct {
	s       *Store
	client  *registry.Client
	limiter *rate.Limiter
	slots   chan struct{}
}

const defaultPulls = 2

// NewPuller makes a Puller.
func NewPuller(c PullerConfig) *Puller {
	p := &Puller{s: c.Store, client: c.Registry, slots: make(chan struct{}, cmp.Or(c.Pulls, defaultPulls))}
	if c.BytesPerSecond > 0 {
		p.limiter = rate.NewLimiter(rate.Limit(c.BytesPerSecond), int(min(max(c.BytesPerSecond, 4<<10), maxChunk)))
	}
	return p
}

// Image makes the image that a pod asks for available, by its pull policy,
// and returns it unpacked. Errors are *workload.StartError.
func (p *Puller) Image(ctx context.Context, req workload.ImageRequest, progress workload.Progress) (*Image, error) {
	r, err := p.resolve(ctx, req, false, progress)
	if err != nil {
		return nil, err
	}
	if r.config == nil {
		return nil, badImage(req.Image, "it is a WebAssembly module, not a container image: set runtimeClassName: wasm")
	}
	return p.image(ctx, req, r, progress)
}

// image opens what was resolved.
func (p *Puller) image(ctx context.Context, req workload.ImageRequest, r *resolved, progress workload.Progress) (*Image, error) {
	img, err := p.s.open(ctx, r)
	var se *workload.StartError
	if errors.As(err, &se) && se.Reason == ReasonNeverPull && req.Policy != policyNever {
		// A blob turned out to be damaged and was set aside.
		if r, err = p.pull(ctx, req, false, progress); err == nil {
			img, err = p.s.open(ctx, r)
		}
	}
	return img, err
}

// Lookup is Store.Lookup.
func (p *Puller) Lookup(ctx context.Context, name, digest string) (*Image, error) {
	return p.s.Lookup(ctx, name, digest)
}

// The pod's words.
const (
	policyNever  = "Never"
	policyAlways = "Always"
)

// resolve finds an image that the pod may run.
func (p *Puller) resolve(ctx context.Context, req workload.ImageRequest, wasm bool, progress workload.Progress) (*resolved, error) {
	r, err := p.find(ctx, req, wasm, progress)
	if err != nil {
		return nil, err
	}
	return r, p.signed(ctx, req, r, nil)
}

// find decides between what is here and what the registry has.
func (p *Puller) find(ctx context.Context, req workload.ImageRequest, wasm bool, progress workload.Progress) (*resolved, error) {
	ref, err := ParseRef(req.Image)
	if err != nil {
		return nil, err
	}
	here, err := p.local(ref, req.Image, wasm)
	if err != nil && !errors.Is(err, errMissing) {
		return nil, err
	}
	switch {
	case req.Policy == policyNever:
		if here == nil {
			return nil, notHere(req.Image, err)
		}
		return p.allowed(ctx, req, ref, here)
	case here != nil && (req.Policy != policyAlways || ref.Digest != ""):
		p.s.used(ref.Name())
		return p.allowed(ctx, req, ref, here) // a digest never means something else
	case here == nil:
		r, err := p.pull(ctx, req, wasm, progress)
		return r, p.importAgain(ref, err)
	}
	return p.revalidate(ctx, req, ref, here, wasm, progress)
}

// importAgain says of a failed pull that there was no need for one: the image
// had been imported, and part of it is lost.
func (p *Puller) importAgain(ref Ref, err error) error {
	var se *workload.StartError
	if !errors.As(err, &se) {
		return err
	}
	if rec, ok := p.s.readName(ref.Name()); !ok || !rec.Imported {
		return err
	}
	said := *se
	said.Hint = strings.TrimPrefix(said.Hint+"; ", "; ") + "it was imported on this node, and part of it is damaged or gone: import it again (dunlin import)"
	return &said
}

// local is what the name means here, if everything of it is here.
func (p *Puller) local(ref Ref, image string, wasm bool) (*resolved, error) {
	digest := ref.Digest
	if rec, ok := p.s.readName(ref.Name()); ok {
		digest = rec.Digest
	}
	if digest == "" {
		return nil, errMissing
	}
	r, err := p.s.describe(image, digest, wasm)
	if err != nil {
		return nil, err
	}
	if !p.s.hasLayers(r) {
		return nil, errMissing
	}
	return r, nil
}

// askTimeout bounds the question whether a tag has moved, where what it meant
// last is here and can start.
const askTimeout = 5 * time.Second

// revalidate is policy Always with an image that is here: the registry is
// asked, and only when it answers is its word taken. A node without a network
// starts what it has.
func (p *Puller) revalidate(ctx context.Context, req workload.ImageRequest, ref Ref, here *resolved, wasm bool, progress workload.Progress) (*resolved, error) {
	ask, cancel := context.WithTimeoutCause(ctx, askTimeout, fmt.Errorf("no answer within %s", askTimeout))
	defer cancel()
	session := p.client.Open(ref.Registry, ref.Repository, req.Credentials)
	digest, err := session.Head(ask, ref.Tag)
	if err == nil && digest == here.digest {
		p.s.used(ref.Name())
		return here, p.settle(here, session, req.PodNamespace, true)
	}
	if err == nil {
		return p.pull(ctx, req, wasm, progress)
	}
	var re *registry.Error
	if ctx.Err() == nil && (!errors.As(err, &re) || !re.Answered()) && p.s.mayHave(here.digest, req.PodNamespace) {
		tell(progress, fmt.Sprintf("%simage %q is used as it is on this node, though imagePullPolicy is Always: %v", workload.Kept, req.Image, err))
		return here, nil
	}
	return nil, pullError(req.Image, err)
}

func tell(progress workload.Progress, m string) {
	if progress != nil {
		progress(m)
	}
}

// pull fetches an image, one pull of a name at a time.
func (p *Puller) pull(ctx context.Context, req workload.ImageRequest, wasm bool, progress workload.Progress) (*resolved, error) {
	ref, err := ParseRef(req.Image)
	if err != nil {
		return nil, err
	}
	release, err := p.s.single(ctx, "pull "+ref.Name())
	if err != nil {
		return nil, err
	}
	defer release()
	at, err := p.take(ctx, progress)
	if err != nil {
		return nil, err
	}
	defer at.release()
	r, err := p.fetch(ctx, ref, req, wasm, at)
	if err != nil {
		return nil, pullError(req.Image, err)
	}
	return r, nil
}

func (p *Puller) fetch(ctx context.Context, ref Ref, req workload.ImageRequest, wasm bool, at *place) (*resolved, error) {
	session := p.client.Open(ref.Registry, ref.Repository, req.Credentials)
	reference := ref.Tag
	if ref.Digest != "" {
		reference = ref.Digest
	}
	hold := p.s.newHold()
	defer hold.release()
	top, err := session.Manifest(ctx, reference, maxManifest)
	if err != nil {
		return nil, err
	}
	digest := digestOf(top)
	raw, err := p.s.manifestFor(req.Image, digest, wasm, func(d v1.Descriptor) ([]byte, error) {
		b := top
		if d.Digest.String() != digest {
			if b, err = session.Manifest(ctx, d.Digest.String(), maxManifest); err != nil {
				return nil, err
			}
		}
		hold.add(d.Digest.String())
		_, err := p.s.putBlob(b)
		return b, err
	})
	if err != nil {
		return nil, err
	}
	m, err := parseManifest(req.Image, raw)
	if err != nil {
		return nil, err
	}
	hold.add(m.Config.Digest.String())
	for i := range m.Layers {
		hold.add(m.Layers[i].Digest.String())
	}
	if err := p.config(ctx, session, m.Config); err != nil {
		return nil, err
	}
	r, err := p.s.describe(req.Image, digest, wasm) // a wrong platform ends here, before the layers
	if err != nil {
		return nil, err
	}
	if err := p.signed(ctx, req, r, session); err != nil {
		return nil, err
	}
	named, err := p.s.named(r)
	if err != nil {
		return nil, err
	}
	if err := p.settle(r, session, req.PodNamespace, named && p.s.hasLayers(r)); err != nil {
		return nil, err
	}
	for again := false; ; again = true {
		if err := p.layers(ctx, session, r, at); err != nil {
			return nil, err
		}
		if r.config == nil {
			break
		}
		tell(at.progress, "unpacking")
		_, err := p.s.open(ctx, r)
		if errors.Is(err, errMissing) && !again {
			continue // a blob that was here is damaged, and now set aside
		}
		if err != nil {
			return nil, err
		}
		break
	}
	return r, p.name(ref, r)
}

// name makes the image what the name means, from now on.
func (p *Puller) name(ref Ref, r *resolved) error {
	unlock, err := p.s.lock(unix.LOCK_SH)
	if err != nil {
		return err
	}
	defer unlock()
	now := p.s.cfg.Clock.Now().UTC()
	return p.s.writeName(nameRecord{Name: ref.Name(), Digest: r.digest, AddedAt: now, LastUsedAt: now})
}

func (p *Puller) config(ctx context.Context, session *registry.Session, d v1.Descriptor) error {
	if _, err := p.s.readBlob(d.Digest.String(), maxConfig); err == nil {
		return nil
	}
	b, err := session.Small(ctx, d.Digest.String(), maxConfig)
	if err != nil {
		return err
	}
	_, err = p.s.putBlob(b)
	return err
}

// maxBlob is more than any layer has; sums of such sizes are numbers still.
const maxBlob = 1 << 40

// layers fetches what is missing, one after the other, after a look at the
// space: the least that they take is their size twice, packed and unpacked.
func (p *Puller) layers(ctx context.Context, session *registry.Session, r *resolved, at *place) error {
	var missing []v1.Descriptor
	var bytes, here int64
	seen := map[string]bool{}
	for i := range r.m.Layers {
		l := r.m.Layers[i]
		digest := l.Digest.String()
		if seen[digest] || p.s.hasBlob(digest, l.Size) {
			continue
		}
		if l.Size > maxBlob {
			return badImage(r.name, "layer %.19s has %d bytes: that is no layer", digest, l.Size)
		}
		seen[digest] = true
		missing = append(missing, l)
		bytes += l.Size
		here += p.s.partialSize(digest)
	}
	if len(missing) == 0 {
		return nil
	}
	need := bytes - here
	if r.config != nil {
		need += bytes
	}
	if err := p.s.room(need); err != nil {
		return err
	}
	meter := newMeter(bytes, here, at.progress)
	for _, l := range missing {
		if err := p.layer(ctx, session, l, meter, at); err != nil {
			return err
		}
	}
	return nil
}

// layer fetches one. What came in pieces and does not match is fetched once
// more from the beginning: a disk may have lost a part.
func (p *Puller) layer(ctx context.Context, session *registry.Session, l v1.Descriptor, meter *meter, at *place) error {
	digest := l.Digest.String()
	// Who waits for what another pull fetches keeps no place from it: that one
	// may have given its own back, and need it.
	release, err := p.s.singleOr(ctx, "blob "+digest, at.release)
	if err != nil {
		return err
	}
	defer release()
	if err := at.again(ctx); err != nil {
		return err
	}
	for again := false; ; again = true {
		if p.s.hasBlob(digest, l.Size) {
			return nil
		}
		d, err := p.s.openDownload(ctx, digest, l.Size)
		if err != nil {
			return err
		}
		d.limiter, d.onProgress, d.rest = p.limiter, meter.came, at.rest
		resumed := d.resumed
		err = d.run(ctx, session.Blob)
		var mismatch *mismatchError
		if errors.As(err, &mismatch) && resumed && !again {
			p.s.log.Warn("a download that was taken up again does not match: once more from the beginning", "layer", digest, "err", err)
			continue
		}
		return err
	}
}

// meter tells how far a pull is: at the beginning, and every quarter of a
// minute that it lasts.
type meter struct {
	mu       sync.Mutex
	progress workload.Progress
	total    int64
	have     int64
	began    time.Time
	told     time.Time
	first    int64
}

const tellEvery = 15 * time.Second

func newMeter(total, here int64, progress workload.Progress) *meter {
	m := &meter{progress: progress, total: total, have: here, first: here, began: time.Now(), told: time.Now()}
	what := mib(total)
	if here > 0 {
		what += ", of which " + mib(here) + " are here from before"
	}
	tell(progress, workload.Pulling+what)
	return m
}

func (m *meter) came(n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.have += n
	now := time.Now()
	if now.Sub(m.told) < tellEvery || m.have >= m.total {
		return
	}
	m.told = now
	speed := float64(m.have-m.first) / now.Sub(m.began).Seconds()
	tell(m.progress, fmt.Sprintf("%s%s of %s, %.1f KiB/s", workload.Pulling, mib(m.have), mib(m.total), speed/(1<<10)))
}

// pullError gives what went wrong its name, one line, and what to do.
func pullError(image string, err error) error {
	var se *workload.StartError
	if errors.As(err, &se) {
		return err
	}
	out := &workload.StartError{Reason: ReasonPull, Err: err, Message: fmt.Sprintf("cannot pull %s: %v", image, err)}
	var (
		re    *registry.Error
		space *SpaceError
	)
	switch {
	case errors.As(err, &space):
		out.Hint = "remove what is not needed (dunlin images), or give the node a larger disk"
	case errors.As(err, &re):
		out.Hint, out.RetryAfter = re.Hint(), re.RetryAfter
	}
	return out
}

// hold keeps blobs that no name names yet from Collect.
type hold struct {
	s       *Store
	digests []string
	done    atomic.Bool
}

func (s *Store) newHold() *hold { return &hold{s: s} }

func (h *hold) add(digest string) {
	h.s.mu.Lock()
	defer h.s.mu.Unlock()
	h.s.held[digest]++
	h.digests = append(h.digests, digest)
}

func (h *hold) release() {
	if h.done.Swap(true) {
		return
	}
	h.s.mu.Lock()
	defer h.s.mu.Unlock()
	for _, d := range h.digests {
		if h.s.held[d]--; h.s.held[d] == 0 {
			delete(h.s.held, d)
		}
	}
}
