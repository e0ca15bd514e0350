package consensus

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// ErrNothing says that a folder holds no state to recover.
var ErrNothing = errors.New("there is no state in it")

// ErrHalfRecovered says that a recovery began and was not completed.
var ErrHalfRecovered = errors.New("the recovery is half done: when the disk takes writes again, do it again before any server is started")

// Recovered describes what a recovery or a restore made.
type Recovered struct {
	ClusterID string
	Version   uint64 // of the state
	Epoch     uint64 // the new one
	Moved     string // where the old folder is now, if it was replaced
}

// Recover makes the server of a state folder the only voter, with everything
// that the folder holds, in a new recovery epoch: what is left to do when most
// voters are lost for good. Nobody may have the folder open. It can be
// repeated.
func Recover(ctx context.Context, cfg Config) (out Recovered, err error) {
	n, err := prepareFolder(ctx, cfg)
	if err != nil {
		return out, fmt.Errorf("recover: %w", err)
	}
	defer n.release()
	if _, newest := n.snaps.kept(); n.logs.last.Load() == 0 && newest == 0 {
		return out, fmt.Errorf("recover %s: %w: it never had a copy of the cluster's", cfg.Dir, ErrNothing)
	}
	was := n.identity.id
	id := was
	id.Recover = true
	f := &fsm{machine: n.machine, halt: func(error) {}, grown: func() {}}
	snaps := &markingSnaps{snapshotStore: n.snaps, mark: func() error { return n.identity.save(id) }}
	err = raft.RecoverCluster(n.raftConfig(), f, n.logs, n.stable, snaps, n.trans, soleConfiguration(id.Server))
	if halted := n.machine.Halted(); halted != nil {
		err = halted // why there is no snapshot
	}
	switch {
	case err == nil || !snaps.marked:
	case snaps.mayCount():
		err = fmt.Errorf("%w; %w", err, ErrHalfRecovered)
	default:
		if back := n.identity.save(was); back != nil {
			err = fmt.Errorf("%w (%w); %w", err, back, ErrHalfRecovered)
		}
	}
	if err != nil {
		return out, fmt.Errorf("recover %s: %w", cfg.Dir, err)
	}
	return Recovered{ClusterID: id.Cluster, Version: n.machine.Snapshot().ResourceVersion(), Epoch: n.Epoch()}, nil
}

// markingSnaps marks the server as recovered just before the snapshot of the
// recovery counts: not earlier, as one that cannot be done must leave all as it
// was, and not later, as no other epoch's server may be listened to from then
// on.
type markingSnaps struct {
	*snapshotStore
	mark   func() error
	marked bool // or tried to
	sink   *snapshotSink
}

// Create implements raft.SnapshotStore.
func (m *markingSnaps) Create(version raft.SnapshotVersion, index, term uint64, servers raft.Configuration, serversIndex uint64, trans raft.Transport) (raft.SnapshotSink, error) {
	sink, err := m.snapshotStore.Create(version, index, term, servers, serversIndex, trans)
	if k, ok := sink.(*snapshotSink); ok {
		m.sink = k
		k.before = func() error {
			m.marked = true
			return m.mark()
		}
	}
	return sink, err
}

// mayCount says whether the snapshot may be found by the next start, also where
// its writing failed: then the mark must stay.
func (m *markingSnaps) mayCount() bool {
	_, err := os.Stat(m.file(m.sink.ID(), ".meta"))
	return !errors.Is(err, os.ErrNotExist)
}

// Voters reads from the folder of a server that does not run whose votes count
// as far as it knows, and of which recovery epoch it is.
func Voters(ctx context.Context, cfg Config) (ids []string, epoch uint64, err error) {
	n, err := prepareFolder(ctx, cfg)
	if err != nil {
		return nil, 0, fmt.Errorf("read servers: %w", err)
	}
	defer n.release()
	c, err := n.storedConfiguration()
	if err != nil {
		return nil, 0, fmt.Errorf("read servers of %s: %w", cfg.Dir, err)
	}
	for _, s := range c.Servers {
		if s.Suffrage == raft.Voter {
			ids = append(ids, string(s.ID))
		}
	}
	return ids, n.Epoch(), nil
}

// storedConfiguration is the newest one in the log behind the snapshot, which
// counts from the moment it is there (Raft dissertation, 4.1), or else that of
// the snapshot.
func (n *Node) storedConfiguration() (c raft.Configuration, err error) {
	first, err := n.logs.FirstIndex()
	if err != nil {
		return c, fmt.Errorf("log: %w", err)
	}
	_, covered := n.snaps.kept()
	for i := n.logs.last.Load(); i >= first && i > covered; i-- {
		var l raft.Log
		if err := n.logs.GetLog(i, &l); err != nil {
			return c, fmt.Errorf("log entry %d: %w", i, err)
		}
		if l.Type == raft.LogConfiguration {
			return raft.DecodeConfiguration(l.Data), nil
		}
	}
	metas, err := n.snaps.List()
	if err != nil || len(metas) == 0 {
		return c, err
	}
	return metas[0].Configuration, nil
}

func soleConfiguration(id string) raft.Configuration {
	return raft.Configuration{Servers: []raft.Server{{Suffrage: raft.Voter, ID: raft.ServerID(id), Address: raft.ServerAddress(id)}}}
}

// prepareFolder opens the files of a state folder without starting Raft.
func prepareFolder(ctx context.Context, cfg Config) (*Node, error) {
	n, err := newNode(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(cfg.Dir); err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	if err := n.openFiles(); err != nil {
		n.release()
		return nil, err
	}
	return n, nil
}

// release gives a folder back that was opened without Raft.
func (n *Node) release() {
	n.cancel()
	n.closeFiles()
}

// WriteImage writes the whole state as a file that can be kept elsewhere:
// a header with format, size and checksum, then the snapshot file. dir is for
// a temporary file.
func WriteImage(im *state.Image, dir string, w io.Writer) (err error) {
	tmp := filepath.Join(dir, fmt.Sprintf("image-%d.tmp", time.Now().UnixNano()))
	defer func() { _ = os.Remove(tmp) }()
	if err := im.Write(tmp); err != nil {
		return err
	}
	sum, size, err := sumFile(tmp)
	if err != nil {
		return fmt.Errorf("image: %w", err)
	}
	m := &snapshotMeta{Format: state.ImageFormat, Size: size, Sum: sum}
	if _, err := w.Write(m.header()); err != nil {
		return err
	}
	f, err := os.Open(tmp)
	if err != nil {
		return fmt.Errorf("image: %w", err)
	}
	defer func() { _ = f.Close() }()
	_, err = io.Copy(w, f)
	return err
}

// ImageInfo describes an image file.
type ImageInfo struct {
	ClusterID string
	Epoch     uint64
	Version   uint64
	Objects   int
	Bytes     int64
}

// ReadImageFile checks a file of WriteImage, byte by byte and record by
// record, and copies the snapshot file in it to copyTo.
func ReadImageFile(path, copyTo string) (info ImageInfo, err error) {
	f, err := os.Open(path)
	if err != nil {
		return info, fmt.Errorf("snapshot: %w", err)
	}
	defer func() { _ = f.Close() }()
	head, err := readImageHeader(f)
	if err != nil {
		return info, fmt.Errorf("%s: %w", path, err)
	}
	out, err := os.OpenFile(copyTo, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return info, fmt.Errorf("snapshot: %w", err)
	}
	_, err = io.Copy(out, f)
	if err = errors.Join(err, out.Sync(), out.Close()); err != nil {
		return info, fmt.Errorf("snapshot: %w", err)
	}
	sum, size, err := sumFile(copyTo)
	if err != nil {
		return info, fmt.Errorf("snapshot: %w", err)
	}
	switch want := binary.BigEndian.Uint64(head[8:]); {
	case uint64(size) != want:
		return info, fmt.Errorf("%s: %w: behind its header it has %d bytes and should have %d", path, ErrImageDamaged, size, want)
	case !bytes.Equal(sum[:], head[16:]):
		return info, fmt.Errorf("%s: %w: its checksum differs", path, ErrImageDamaged)
	}
	facts, rv, err := state.ReadImage(copyTo, func(*state.Record) error {
		info.Objects++
		return nil
	})
	if err != nil {
		return info, fmt.Errorf("%s: %w", path, err)
	}
	info.ClusterID, info.Epoch, info.Version, info.Bytes = facts.ClusterID, facts.Epoch, rv, size
	return info, nil
}

// readImageHeader reads what WriteImage writes first.
func readImageHeader(r io.Reader) ([]byte, error) {
	head := make([]byte, streamHeader)
	n, err := io.ReadFull(r, head)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, err
	}
	if n < 4 || binary.BigEndian.Uint32(head) != streamMagic {
		return nil, ErrNoImage
	}
	if err != nil {
		return nil, fmt.Errorf("%w: it ends within its header, after %d bytes", ErrImageDamaged, n)
	}
	if v := binary.BigEndian.Uint32(head[4:]); v > state.ImageFormat {
		return nil, fmt.Errorf("%w (format %d, known %d)", ErrNewerVersion, v, state.ImageFormat)
	}
	return head, nil
}

// Restore replaces a state folder by an image file: its server is the only
// voter, in a new recovery epoch. The old folder is moved aside. Nobody may
// have it open. ClusterID and ServerID are required.
func Restore(ctx context.Context, cfg Config, image string) (out Recovered, err error) {
	epoch := uint64(0)
	if _, err := os.Stat(cfg.Dir); err == nil {
		n, err := newNode(ctx, cfg)
		if err != nil {
			return out, err
		}
		defer n.release()
		if n.lock, err = lockFolder(cfg.Dir); err != nil {
			return out, fmt.Errorf("restore: %w", err)
		}
		if err := n.openIdentity(); err != nil {
			return out, fmt.Errorf("restore: %w", err)
		}
		epoch = n.identity.id.Epoch
	}
	next := cfg.Dir + ".restore"
	if err := os.RemoveAll(next); err != nil {
		return out, fmt.Errorf("restore: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.RemoveAll(next)
		}
	}()
	info, err := buildRestored(ctx, cfg, next, image, epoch)
	if err != nil {
		return out, fmt.Errorf("restore: %w", err)
	}
	out = Recovered{ClusterID: info.ClusterID, Version: info.Version, Epoch: max(epoch, info.Epoch, 1) + 1}
	if _, err := os.Stat(cfg.Dir); err == nil {
		out.Moved = fmt.Sprintf("%s.before-restore-%d", cfg.Dir, time.Now().Unix())
		if err := os.Rename(cfg.Dir, out.Moved); err != nil {
			return out, fmt.Errorf("restore: %w", err)
		}
	}
	return out, (&Disk{}).rename(next, cfg.Dir)
}

// buildRestored makes a new folder of an image.
func buildRestored(ctx context.Context, cfg Config, dir, image string, epoch uint64) (info ImageInfo, err error) {
	cfg.Dir = dir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return info, err
	}
	n, err := newNode(ctx, cfg)
	if err != nil {
		return info, err
	}
	defer n.release()
	if err := n.openFiles(); err != nil {
		return info, err
	}
	tmp := filepath.Join(dir, "image.db")
	if info, err = ReadImageFile(image, tmp); err != nil {
		return info, err
	}
	if info.ClusterID != cfg.ClusterID {
		return info, fmt.Errorf("%w: the snapshot is of cluster %s, this server of %s", ErrOtherCluster, info.ClusterID, cfg.ClusterID)
	}
	sum, size, err := sumFile(tmp)
	if err != nil {
		return info, err
	}
	m := &snapshotMeta{Format: state.ImageFormat, Index: 1, Term: 1, Config: raft.EncodeConfiguration(soleConfiguration(cfg.ServerID)), ConfigIndex: 1, Size: size, Sum: sum}
	if err := n.snaps.add(m, tmp); err != nil {
		return info, err
	}
	if err := n.stable.forget(1, 1); err != nil {
		return info, err
	}
	id := n.identity.id
	id.Recover, id.Epoch, id.Joined = true, max(epoch, info.Epoch), false
	return info, n.identity.save(id)
}
