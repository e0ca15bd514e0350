package controlplane

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/controlplane/peers"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/feature"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

// openConsensus makes the connections to the other servers, then opens the
// replicated state over them.
func (s *Server) openConsensus(ctx context.Context, id identity) (err error) {
	if s.cert, err = pki.NewServing(s.ca, id.server, s.names(s.advertise())); err != nil {
		return err
	}
	how, err := loadJoined(s.cfg.StateDir)
	if err != nil {
		return err
	}
	seeds := slices.Clone(s.cfg.Peers)
	if how != nil {
		seeds = append(seeds, how.Servers...)
	}
	disk := &consensus.Disk{}
	if s.book, err = consensus.OpenPeers(s.cfg.StateDir, disk); err != nil {
		return err
	}
	opened := make(chan struct{})
	s.mesh, err = peers.New(peers.Config{
		ID: id.server, ClusterID: s.ca.ClusterID(), Name: s.name(id.server), Version: s.cfg.Version,
		Epoch: func() uint64 { // Raft dials before it is open
			<-opened
			if s.raft == nil {
				return 1
			}
			return s.raft.Epoch()
		},
		Level: func() uint32 {
			<-opened
			if s.raft == nil {
				return 0
			}
			return s.raft.State().Facts().Feature
		},
		Addresses: s.advertise, Hints: s.hinted, Seeds: seeds,
		Roots: []*x509.Certificate{s.ca.Cert}, Certificate: func() (*tls.Certificate, error) { return s.cert.GetClientCertificate(nil) },
		Book: s.book, Fenced: s.fencedOut, Behind: func(level uint32) { s.raft.Halt(feature.Behind(level)) }, Removed: s.removedServer, Dial: s.cfg.Dial, Log: s.log.With("part", "servers"),
	})
	if err != nil {
		return errors.Join(err, s.book.Close())
	}
	s.mesh.Handle(s.serveServer)
	trans := s.mesh.RaftTransport()
	ring, _ := rooms(s.cfg.Memory)
	conf := consensus.Config{
		Machine: state.Options{RingBytes: ring},
		Dir:     filepath.Join(s.cfg.StateDir, "raft"), ClusterID: s.ca.ClusterID(), ExpectClusterID: s.ca.ClusterID(), ServerID: id.server,
		Feature: feature.Level, Transport: trans, Disk: disk, Log: s.log.With("part", "consensus"),
		Committed: func(d time.Duration) { s.commits.Observe(d.Seconds()) }, Roomy: s.roomy,
	}
	if how != nil {
		conf.Join, conf.Epoch = true, how.Epoch
	}
	if s.cfg.Consensus != nil {
		s.cfg.Consensus(&conf)
	}
	if err = checkState(s.cfg.StateDir, conf.Dir, how != nil); err == nil {
		s.raft, err = consensus.Open(ctx, conf)
	}
	close(opened)
	if err != nil {
		return errors.Join(err, s.mesh.Close(), trans.Close(), s.book.Close())
	}
	if err := markState(s.cfg.StateDir); err != nil { // a full disk, say: that is no reason not to start
		s.log.Warn("mark of the state not written: should the state vanish, this server begins an empty cluster", "err", err)
	}
	s.writes = peers.NewProposer(s.raft, s.mesh)
	return nil
}

// close ends what openConsensus began.
func (s *Server) close() error {
	s.writes.Close()
	s.mesh.StopRaft() // Raft's goroutines wait for answers
	return errors.Join(s.raft.Close(), s.mesh.Close(), s.book.Close())
}

// name is what people call a server.
func (s *Server) name(id string) string {
	if s.cfg.Name != "" {
		return s.cfg.Name
	}
	return id
}

// fencedOut stops this server's part in the cluster: another server proved
// that the cluster went on without it.
func (s *Server) fencedOut(by string, epoch uint64) {
	if epoch == 0 {
		s.raft.Halt(fmt.Errorf("this server was removed from the cluster, says %s: remove its state (%s) and join it again", by, s.cfg.StateDir))
		return
	}
	s.raft.Halt(fmt.Errorf("this server is from before a recovery of the cluster (epoch %d, %s is of %d): remove its state (%s) and join it again", s.raft.Epoch(), by, epoch, s.cfg.StateDir))
}

// serveServer answers what another server asks.
func (s *Server) serveServer(ctx context.Context, from string, t wire.Type, body []byte) (wire.Message, error) {
	if reply, handled, err := peers.ServeForwarded(ctx, s.raft, t, body); handled {
		return reply, err
	}
	switch t {
	case wire.TypeServerStatusRequest:
		r := new(wire.ServerStatusRequest)
		if err := wire.Unmarshal(body, r); err != nil {
			return nil, err
		}
		if r.SyncMicros > 0 {
			s.raft.OtherSync(time.Duration(r.SyncMicros) * time.Microsecond)
		}
		return s.status(), nil
	case wire.TypeNetCheckRequest:
		return s.serveNetCheck(ctx)
	case wire.TypeServerKeysRequest:
		s.log.Info("the cluster's keys go to a new server", "id", from)
		return s.keys()
	case wire.TypeAnnounceRequest:
		r := new(wire.AnnounceRequest)
		if err := wire.Unmarshal(body, r); err != nil {
			return nil, err
		}
		return s.serveAnnounce(ctx, from, r)
	}
	return nil, &wire.Fault{Code: wire.FaultUnsupported, Message: t.String() + " is not served here"}
}

// afterHandOver is a context that ends a moment after ctx: when another voter
// was asked to lead.
func (s *Server) afterHandOver(ctx context.Context) (context.Context, context.CancelFunc) {
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		s.handOver()
		cancel()
	})
	return run, func() {
		stop()
		cancel()
	}
}

// handOver lets another voter lead before this server stops, so that nobody
// has to notice its absence first.
func (s *Server) handOver() {
	if _, leading := s.raft.Leadership(); !leading {
		return
	}
	members, _, err := s.raft.Members()
	others := slices.ContainsFunc(members, func(m consensus.Member) bool { return m.Voter && m.ID != s.raft.ServerID() })
	if err != nil || !others {
		return
	}
	if err := s.raft.HandOver(); err != nil {
		s.log.Info("leadership not handed over before stopping", "err", err)
	}
}

// roomy lists the other voters that could lead: they follow this server, and
// nothing is wrong with their disks.
func (s *Server) roomy(ctx context.Context) (ids []string) {
	members, _, err := s.raft.Members()
	if err != nil {
		return nil
	}
	return roomyOf(members, s.ask(ctx, members, &wire.ServerStatusRequest{}), s.raft.ServerID())
}

// roomyOf is roomy by what the others answered to the leader, which did not
// ask itself. Pure.
func roomyOf(members []consensus.Member, states map[string]serverState, leader string) (ids []string) {
	for _, m := range members {
		if st, asked := states[m.ID]; m.Voter && asked && st.trouble(leader, 0) == "" {
			ids = append(ids, m.ID)
		}
	}
	return ids
}
