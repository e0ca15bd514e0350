package link

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

// ErrRefused is a server's final no; the text says what to do.
var ErrRefused = errors.New("the server refused")

// JoinConfig is what a first join needs.
type JoinConfig struct {
	Line      pki.JoinLine
	Identity  *pki.NodeIdentity
	Name      string // wanted name of the node
	BootID    string
	Facts     map[string]string
	Addresses []string
	Dial      DialFunc // nil is the network
	Log       *slog.Logger
}

// Join exchanges a join line for an identity and keeps it in
// JoinConfig.Identity. It waits, with jitter, for servers that cannot be
// reached, until ctx ends; a refusal (ErrRefused) or a server that is not
// the one of the line (pki.ErrUntrusted) ends it at once.
func Join(ctx context.Context, c JoinConfig) error {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	d := newDialer(c.Dial)
	addrs := targets(c.Line.Servers)
	for try := 0; ; try++ {
		err := joinOnce(ctx, d, addrs, c)
		if err == nil {
			return nil
		}
		if errors.Is(err, ErrRefused) || permanent(err) {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("join: %w (last: %w)", ctx.Err(), err)
		}
		wait := backoff(try, backoffMax)
		c.Log.Info("no server can be reached yet", "error", err, "again_in", wait)
		if !sleep(ctx, wait) {
			return fmt.Errorf("join: %w (last: %w)", ctx.Err(), err)
		}
	}
}

func joinOnce(ctx context.Context, d dialer, addrs []string, c JoinConfig) error {
	var ca *x509.Certificate
	conn, err := d.connectAny(ctx, addrs, wire.ALPNJoin, nil, pki.VerifyPin(c.Line.Pin, func(found *x509.Certificate) { ca = found }))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
	csr, err := c.Identity.CSR()
	if err != nil {
		return err
	}
	proof, err := pki.JoinProof(pki.TokenKey(c.Line.Secret), conn.tls.ConnectionState(), csr)
	if err != nil {
		return err
	}
	if err := wire.WriteMessage(conn, &wire.JoinRequest{
		TokenID: c.Line.ID, Proof: proof, CSR: csr, NodeName: c.Name, BootID: c.BootID, Facts: c.Facts, Addresses: c.Addresses,
	}); err != nil {
		return fmt.Errorf("join: send: %w", err)
	}
	reply := new(wire.JoinReply)
	if err := wire.ReadMessage(conn, reply); err != nil {
		return fmt.Errorf("join: no answer, as from a server that cannot write now (its log says why): %w", err)
	}
	if reply.Refused != "" {
		return fmt.Errorf("%w: %s", ErrRefused, reply.Refused)
	}
	if reply.Notice != "" {
		c.Log.Warn("joined under another name than asked for", "notice", reply.Notice)
	}
	return Adopt(c.Identity, reply, ca, c.Line.Servers)
}

// Adopt keeps what a server granted. ca is the authority that was found by
// the pin; nil where the reply came from within the process.
func Adopt(id *pki.NodeIdentity, reply *wire.JoinReply, ca *x509.Certificate, joinedBy []string) error {
	got, err := x509.ParseCertificate(reply.CA)
	if err != nil {
		return fmt.Errorf("join: cluster CA: %w", err)
	}
	if ca != nil && pki.PinOf(ca) != pki.PinOf(got) {
		return fmt.Errorf("%w: it sent another authority than it used", pki.ErrUntrusted)
	}
	return id.Update(func(g *pki.Grant) {
		if g.ClusterID != reply.ClusterID {
			*g = pki.Grant{}
		}
		g.ClusterID, g.Epoch = reply.ClusterID, max(g.Epoch, reply.Epoch)
		g.NodeName, g.NodeUID = reply.NodeName, reply.NodeUID
		g.Servers, g.JoinedBy = reply.Servers, joinedBy
		g.CA, g.Cert = [][]byte{reply.CA}, reply.Cert
	})
}
