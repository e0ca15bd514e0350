package controlplane

import (
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/controlplane/peers"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

// joined says that a state folder was made for a cluster that existed
// already, and where that was: the fallback for ever.
type joined struct {
	Servers []string `json:"servers"`
	Epoch   uint64   `json:"epoch"`
}

const joinedFile = "joined"

// ErrJoin says why a server could not join.
var ErrJoin = errors.New("join the cluster")

// Timing of a join.
const (
	joinTimeout = 20 * time.Second // one attempt
	joinRetry   = 3 * time.Second
)

// loadJoined reads how the folder began; nil is with a cluster of its own.
func loadJoined(dir string) (*joined, error) {
	b, err := atomicfile.Read(filepath.Join(dir, joinedFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("how this server joined: %w (remove %s and join again)", err, dir)
	}
	j := new(joined)
	if err := json.Unmarshal(b, j); err != nil {
		return nil, fmt.Errorf("how this server joined: %w (remove %s and join again)", err, dir)
	}
	return j, nil
}

// joinIfNew joins the cluster of the configuration's line, unless the folder
// is a server's already.
func joinIfNew(ctx context.Context, cfg Config) error {
	if cfg.Join == nil {
		return nil
	}
	have, err := hasIdentity(cfg.StateDir)
	if err != nil {
		return fmt.Errorf("server id: %w", err)
	}
	if !have {
		return join(ctx, cfg)
	}
	ca, err := pki.LoadCA(filepath.Join(cfg.StateDir, "pki"), cfg.Clock)
	if err == nil && ca.Pin() != cfg.Join.Pin {
		return fmt.Errorf("%w: %s is the state of cluster %s already, and the join line is of another one; name another --state-dir", ErrJoin, cfg.StateDir, ca.ClusterID())
	}
	return nil
}

// join makes a new state folder one of the cluster that the line names: a key
// of its own, a certificate for it against the line, and with that, over
// mutually authenticated TLS, the keys that every server has. The server's id
// is written last: before it the folder is nothing, and the same line, once
// more, goes on with the same key.
func join(ctx context.Context, cfg Config) error {
	if cfg.Dial == nil {
		cfg.Dial = (&net.Dialer{Timeout: 5 * time.Second}).DialContext
	}
	key, err := joinKey(filepath.Join(cfg.StateDir, "pki", "join.key"))
	if err != nil {
		return err
	}
	for {
		err := joinOnce(ctx, cfg, key)
		if err == nil {
			_ = os.Remove(filepath.Join(cfg.StateDir, "pki", "join.key")) // it has done its work
			return nil
		}
		if errors.Is(err, ErrJoin) || errors.Is(err, pki.ErrUntrusted) {
			return err
		}
		cfg.Log.Info("no server can be reached yet", "err", err, "again_in", joinRetry)
		t := time.NewTimer(joinRetry)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("%w: %w (last: %w)", ErrJoin, ctx.Err(), err)
		}
	}
}

func joinKey(path string) (*ecdsa.PrivateKey, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("make state folder: %w", err)
	}
	key, _, err := loadOrCreateKey(path)
	return key, err
}

func joinOnce(ctx context.Context, cfg Config, key *ecdsa.PrivateKey) error {
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return fmt.Errorf("%w: make request: %w", ErrJoin, err)
	}
	var errs []error
	for _, addr := range cfg.Join.Servers {
		reply, err := askToJoin(ctx, addr, *cfg.Join, csr, cfg.Dial)
		if err == nil {
			return takeKeys(ctx, cfg, reply, key)
		}
		if errors.Is(err, ErrJoin) || errors.Is(err, pki.ErrUntrusted) {
			return err
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// askToJoin shows the token and gets a certificate.
func askToJoin(ctx context.Context, addr string, line pki.JoinLine, csr []byte, dial peers.DialFunc) (*wire.JoinReply, error) {
	var ca *x509.Certificate
	nc, err := dial(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	c := tls.Client(nc, &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection does it: by the pin of the join line
		VerifyConnection:   pki.VerifyPin(line.Pin, func(found *x509.Certificate) { ca = found }),
		NextProtos:         []string{wire.ALPNJoin},
	})
	defer func() { _ = c.Close() }()
	if err := c.HandshakeContext(ctx); err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	_ = c.SetDeadline(time.Now().Add(joinTimeout))
	proof, err := pki.JoinProof(pki.TokenKey(line.Secret), c.ConnectionState(), csr)
	if err != nil {
		return nil, err
	}
	if err := wire.WriteMessage(c, &wire.JoinRequest{TokenID: line.ID, Proof: proof, CSR: csr, Server: true}); err != nil {
		return nil, fmt.Errorf("join: send: %w", err)
	}
	reply := new(wire.JoinReply)
	if err := wire.ReadMessage(c, reply); err != nil {
		return nil, fmt.Errorf("join: answer: %w", err)
	}
	if reply.Refused != "" {
		return nil, fmt.Errorf("%w: %s", ErrJoin, reply.Refused)
	}
	if got, err := x509.ParseCertificate(reply.CA); err != nil || ca == nil || pki.PinOf(got) != pki.PinOf(ca) {
		return nil, fmt.Errorf("%w: it sent another authority than it used", pki.ErrUntrusted)
	}
	return reply, nil
}

// takeKeys asks, with the new certificate, for what every server has, and
// writes the folder.
func takeKeys(ctx context.Context, cfg Config, reply *wire.JoinReply, key *ecdsa.PrivateKey) error {
	dir, line := cfg.StateDir, cfg.Join
	ca, err := x509.ParseCertificate(reply.CA)
	if err != nil {
		return fmt.Errorf("%w: authority: %w", ErrJoin, err)
	}
	leaf, err := x509.ParseCertificate(reply.Cert)
	if err != nil {
		return fmt.Errorf("%w: certificate: %w", ErrJoin, err)
	}
	book, err := consensus.OpenPeers(dir, &consensus.Disk{})
	if err != nil {
		return err
	}
	defer func() { _ = book.Close() }()
	mesh, err := peers.New(peers.Config{
		ID: reply.NodeUID, ClusterID: reply.ClusterID, Version: cfg.Version, Epoch: func() uint64 { return reply.Epoch }, Roots: []*x509.Certificate{ca}, Book: book, Dial: cfg.Dial, Log: cfg.Log,
		Certificate: func() (*tls.Certificate, error) {
			return &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key, Leaf: leaf}, nil
		},
	})
	if err != nil {
		return err
	}
	defer func() { _ = mesh.Close() }()
	from, err := mesh.Find(ctx, line.Servers)
	if errors.Is(err, peers.ErrRefused) {
		return fmt.Errorf("%w: %w", ErrJoin, err) // another attempt would hear the same
	}
	if err != nil {
		return err
	}
	keys := new(wire.ServerKeysReply)
	if err := mesh.Call(ctx, from, &wire.ServerKeysRequest{}, keys); err != nil {
		return fmt.Errorf("ask for the cluster's keys: %w", err)
	}
	if err := writeKeys(dir, reply, keys, cfg.Clock); err != nil {
		return err
	}
	j := joined{Servers: slices.Compact(append(slices.Clone(line.Servers), reply.Servers...)), Epoch: keys.Epoch}
	b, err := json.Marshal(j)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrJoin, err)
	}
	if err := atomicfile.Write(filepath.Join(dir, joinedFile), b, 0o600); err != nil {
		return err
	}
	cfg.Log.Info("this server has the keys of the cluster", "cluster", reply.ClusterID, "server", reply.NodeUID)
	return saveIdentity(dir, identity{server: reply.NodeUID, cluster: reply.ClusterID})
}

func writeKeys(dir string, reply *wire.JoinReply, keys *wire.ServerKeysReply, clk clock.Clock) error {
	ca, err := pki.ParseCA(keys.CA, keys.CAKey, clk)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrJoin, err)
	}
	if got, err := x509.ParseCertificate(reply.CA); err != nil || pki.PinOf(got) != pki.PinOf(ca.Cert) {
		return fmt.Errorf("%w: it sent the key of another authority", pki.ErrUntrusted)
	}
	if len(keys.SealKey) != registry.SealKeySize || len(keys.TokenKey) == 0 {
		return fmt.Errorf("%w: the keys are incomplete", ErrJoin)
	}
	pkiDir := filepath.Join(dir, "pki")
	if err := ca.Save(pkiDir); err != nil {
		return err
	}
	for _, p := range []string{"seal.key", "seal.key.copy"} {
		if err := atomicfile.Write(filepath.Join(pkiDir, p), keys.SealKey, 0o600); err != nil {
			return err
		}
	}
	for _, p := range []string{"service-account.key", "service-account.key.copy"} {
		if err := atomicfile.WriteRaw(filepath.Join(pkiDir, p), keys.TokenKey, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// keys answers a new server: what every server has. It reads the files, so
// that the keys are in memory no longer than it takes.
func (s *Server) keys() (*wire.ServerKeysReply, error) {
	caKey, err := s.ca.KeyPEM()
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(s.cfg.StateDir, "pki")
	seal, err := readSealKey(filepath.Join(dir, "seal.key"))
	if err != nil {
		return nil, err
	}
	token, err := os.ReadFile(filepath.Join(dir, "service-account.key"))
	if err != nil {
		return nil, fmt.Errorf("read key: %w", err)
	}
	return &wire.ServerKeysReply{CA: s.ca.PEM(), CAKey: caKey, SealKey: seal, TokenKey: token, Epoch: s.raft.Epoch()}, nil
}
