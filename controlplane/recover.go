package controlplane

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/controlplane/peers"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/internal/feature"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

// offline is the configuration of the consensus folder of a server that does
// not run.
func offline(stateDir string, log *slog.Logger) (consensus.Config, error) {
	have, err := hasIdentity(stateDir)
	if err != nil {
		return consensus.Config{}, fmt.Errorf("server id: %w", err)
	}
	if !have {
		return consensus.Config{}, fmt.Errorf("%s is no server's state folder; give --state-dir", stateDir)
	}
	id, err := loadIdentity(stateDir)
	if err != nil {
		return consensus.Config{}, err
	}
	ca, err := pki.LoadCA(filepath.Join(stateDir, "pki"), clock.System)
	if err != nil {
		return consensus.Config{}, err
	}
	return consensus.Config{
		Dir: filepath.Join(stateDir, "raft"), ClusterID: ca.ClusterID(), ExpectClusterID: ca.ClusterID(), ServerID: id.server, Log: log,
	}, nil
}

// Recover makes the server of a state folder, which must not run, the only
// one of its cluster, in a new recovery epoch: its state and its keys stay, so
// that nodes, which trust the authority, come back by themselves.
func Recover(ctx context.Context, stateDir string, log *slog.Logger) (consensus.Recovered, error) {
	cfg, err := offline(stateDir, log)
	if err != nil {
		return consensus.Recovered{}, err
	}
	return consensus.Recover(ctx, cfg)
}

// Restore replaces the state of a server, which must not run, by a snapshot;
// otherwise as Recover.
func Restore(ctx context.Context, stateDir, snapshot string, log *slog.Logger) (consensus.Recovered, error) {
	cfg, err := offline(stateDir, log)
	if err != nil {
		return consensus.Recovered{}, err
	}
	return consensus.Restore(ctx, cfg, snapshot)
}

// ErrClusterRuns says that a recovery or a restore would end servers that are
// not lost.
var ErrClusterRuns = errors.New("the cluster is not lost")

// CheckLost refuses a recovery or a restore of the server of a state folder,
// which must not run, while so many of the others answer that with it they are
// a quorum: they would be shut out, and what they acknowledged be lost. A
// folder that cannot be read does not say who they are: then none may answer.
func CheckLost(ctx context.Context, stateDir string, log *slog.Logger) error {
	cfg, err := offline(stateDir, log)
	if err != nil {
		return err
	}
	voters, epoch, unread := consensus.Voters(ctx, cfg)
	if errors.Is(unread, consensus.ErrLocked) {
		return unread
	}
	at, err := answering(ctx, stateDir, cfg.ServerID, voters, epoch, log)
	if unread != nil && (len(at) > 0 || errors.Is(err, ErrClusterRuns)) {
		slices.Sort(at)
		return fmt.Errorf("%w, perhaps: other servers answer (%s), and what this one has cannot be read (%w): join it anew. If the others are to be given up, stop them first",
			ErrClusterRuns, strings.Join(at, ", "), unread)
	}
	if err != nil {
		return err
	}
	run := len(at)
	if slices.Contains(voters, cfg.ServerID) {
		run++
	}
	if len(at) == 0 || run < len(voters)/2+1 {
		return nil
	}
	slices.Sort(at)
	return fmt.Errorf("%w: servers answer at %s, and %d of %d servers, which this one brings them to, are a quorum: start this server as it is. If those are to be given up, stop them first",
		ErrClusterRuns, strings.Join(at, ", "), run, len(voters))
}

// answering are the addresses at which other voters answer, as a server that
// does not run finds them; without voters, any that it knew.
func answering(ctx context.Context, stateDir, self string, voters []string, epoch uint64, log *slog.Logger) ([]string, error) {
	ca, err := pki.LoadCA(filepath.Join(stateDir, "pki"), clock.System)
	if err != nil {
		return nil, err
	}
	cert, err := pki.NewServing(ca, self, nil)
	if err != nil {
		return nil, err
	}
	book, err := consensus.OpenPeers(stateDir, &consensus.Disk{})
	if err != nil {
		return nil, err
	}
	defer func() { _ = book.Close() }()
	if voters == nil {
		voters = slices.Collect(maps.Keys(book.All()))
	}
	var mu sync.Mutex
	var at []string
	var later error
	mesh, err := peers.New(peers.Config{
		ID: self, ClusterID: ca.ClusterID(), Epoch: func() uint64 { return epoch }, Roots: []*x509.Certificate{ca.Cert}, Book: book, Log: log,
		Certificate: func() (*tls.Certificate, error) { return cert.GetClientCertificate(nil) },
		Fenced: func(by string, epoch uint64) {
			mu.Lock()
			defer mu.Unlock()
			later = fmt.Errorf("%w: it went on without this server, says %s (recovery epoch %d): remove %s and join this server again", ErrClusterRuns, by, epoch, stateDir)
		},
		Behind: func(level uint32) {
			mu.Lock()
			defer mu.Unlock()
			later = fmt.Errorf("%w: %w", ErrClusterRuns, feature.Behind(level))
		},
	})
	if err != nil {
		return nil, err
	}
	defer func() { _ = mesh.Close() }()
	var wg sync.WaitGroup
	for _, id := range voters {
		if id == self {
			continue
		}
		wg.Go(func() {
			addr, err := mesh.Answers(ctx, id)
			if errors.Is(err, peers.ErrRefused) { // who refuses is not lost
				addr, err = id, nil
			}
			if err != nil {
				log.Debug("another server does not answer", "server", id, "err", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			at = append(at, addr)
		})
	}
	wg.Wait()
	return at, later
}

// epochKey of the list of servers is the recovery epoch that it is of.
const epochKey = "epoch"

// afterRecovery takes what was lost in a recovery off the list of servers:
// whoever is not in Raft's configuration when a new epoch begins. On the
// leader.
func (s *Server) afterRecovery(ctx context.Context) error {
	epoch := s.raft.Epoch()
	if s.servers().epoch >= epoch {
		return nil
	}
	members, _, err := s.raft.Members()
	if err != nil {
		return err
	}
	stays := map[string]bool{}
	for _, m := range members {
		stays[m.ID] = true
	}
	stamp := s.cfg.Clock.Now().UTC().Format(time.RFC3339)
	return s.changeServers(ctx, func(data map[string]string) {
		for id := range decodeServers(data).entries {
			if !stays[id] {
				s.log.Warn("a server was left behind by a recovery", "id", id, "epoch", epoch)
				delete(data, id)
				data[removedPrefix+id] = stamp
			}
		}
		data[epochKey] = strconv.FormatUint(epoch, 10)
	})
}

// SnapshotPath is where an administrator gets the whole state as a file.
const SnapshotPath = "/dunlin.dev/v1/snapshot"

// getSnapshot writes the state as of now. Secrets in it are sealed; the key is
// not in it.
func (s *Server) getSnapshot(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), 5*time.Second)
	defer cancel()
	if err := s.writes.Barrier(ctx); err != nil {
		// What is here is worth saving all the more.
		w.Header().Add("Warning", `299 - "this snapshot may be out of date: no server leads"`)
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(time.Hour))
	w.Header().Set("Content-Type", "application/octet-stream")
	sent := &sentWriter{w: w}
	// A copy of the state is made first. Where its folder is full, that would
	// take what is kept for deletions, and a snapshot is wanted all the more.
	beside := s.cfg.StateDir
	if s.raft.Fault() != nil {
		beside = os.TempDir()
	}
	err := s.writeSnapshot(beside, sent)
	switch {
	case err == nil:
	case sent.any:
		s.log.Warn("snapshot not sent", "err", err)
		panic(http.ErrAbortHandler) // the client sees that it is cut short
	default:
		writeStatus(w, apierrors.NewInternalError(fmt.Errorf("there is no place for a copy of the state, from which a snapshot is sent: make room on this server, or ask another one: %w", err)))
	}
}

// writeSnapshot sends the state by way of a file in a folder of its own in dir.
func (s *Server) writeSnapshot(dir string, w io.Writer) error {
	own, err := os.MkdirTemp(dir, "dunlin-snapshot-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(own) }()
	return consensus.WriteImage(s.raft.State().Image(), own, w)
}

// sentWriter knows whether anything was written.
type sentWriter struct {
	w   io.Writer
	any bool
}

func (s *sentWriter) Write(p []byte) (int, error) {
	s.any = true
	return s.w.Write(p)
}

// lostVersions are the versions that recoveries gave up, for nodes.
func (s *Server) lostVersions() []wire.Lost {
	lost := s.raft.State().Facts().Lost
	out := make([]wire.Lost, len(lost))
	for i, l := range lost {
		out[i] = wire.Lost(l)
	}
	return out
}
