package controlplane

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/mux"
)

// The nodes' connections are the leader's. Another server that a client asks
// for a stream into a pod serves that client itself, and has the leader join
// it with the node: so it is there to say why, when the leader is not.
const (
	sessionPath    = "/dunlin.dev/session"
	sessionHeader  = "Dunlin-Session" // base64 of a wire.StreamRequest
	sessionNode    = "Dunlin-Session-Node"
	sessionUpgrade = "dunlin-session"
	// sessionAsk bounds how long the leader, which asks the node, may take.
	sessionAsk = 45 * time.Second
)

// sessions opens sessions to nodes from any server.
type sessions struct{ s *Server }

// Session implements podstream.Nodes and podproxy.Nodes.
func (x sessions) Session(ctx context.Context, pod *corev1.Pod, kind, container string) (*mux.Mux, error) {
	id := x.s.forward.wait(ctx)
	switch id {
	case "":
		return nil, unavailable("no server leads at the moment: try again")
	case x.s.raft.ServerID():
		return x.s.nodes.Session(ctx, pod, kind, container)
	}
	node, r, err := nodeapi.SessionRequest(pod, kind, container)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, sessionAsk)
	defer cancel()
	c, err := x.s.forward.tr.DialTLSContext(ctx, "tcp", net.JoinHostPort(id, "443"))
	if err != nil {
		return nil, unavailable("the leader of the control plane does not answer: try again")
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	br, err := askSession(ctx, c, node, r)
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return mux.New(&leaderConn{Conn: c, br: br}, true, 0), nil
}

// askSession has the leader join a connection with a node.
func askSession(ctx context.Context, c net.Conn, node string, r *wire.StreamRequest) (*bufio.Reader, error) {
	b, err := wire.Marshal(r)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://leader"+sessionPath, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", sessionUpgrade)
	req.Header.Set(sessionNode, node)
	req.Header.Set(sessionHeader, base64.StdEncoding.EncodeToString(b))
	br := bufio.NewReader(c)
	err = req.Write(c)
	var resp *http.Response
	if err == nil {
		resp, err = http.ReadResponse(br, req)
	}
	if err != nil {
		return nil, unavailable("the leader of the control plane does not answer: try again")
	}
	if resp.StatusCode == http.StatusSwitchingProtocols {
		return br, nil
	}
	defer func() { _ = resp.Body.Close() }()
	st := &metav1.Status{}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 64<<10)).Decode(st); err != nil || st.Code == 0 {
		return nil, unavailable(fmt.Sprintf("the leader of the control plane opens no stream (HTTP %d): try again", resp.StatusCode))
	}
	return nil, &apierrors.StatusError{ErrStatus: *st}
}

// leaderConn is a stream of a node by way of the leader. Its end, whatever
// came to an end, is the loss of the node to whom it serves.
type leaderConn struct {
	net.Conn
	br *bufio.Reader
}

// Read implements net.Conn.
func (c *leaderConn) Read(p []byte) (int, error) {
	n, err := c.br.Read(p)
	if err != nil {
		err = mux.ErrLost
	}
	return n, err
}

// serveSession joins another server's connection with a node.
func (s *Server) serveSession(w http.ResponseWriter, r *http.Request) {
	if !s.isServer(r) {
		writeStatus(w, &apierrors.StatusError{ErrStatus: metav1.Status{
			Status: metav1.StatusFailure, Code: http.StatusForbidden, Reason: metav1.StatusReasonForbidden, Message: "servers ask this of each other",
		}})
		return
	}
	req := new(wire.StreamRequest)
	b, err := base64.StdEncoding.DecodeString(r.Header.Get(sessionHeader))
	if err == nil {
		err = wire.Unmarshal(b, req)
	}
	if err != nil {
		writeStatus(w, apierrors.NewBadRequest(err.Error()))
		return
	}
	node, lost, err := s.nodes.OpenSession(r.Context(), r.Header.Get(sessionNode), *req)
	if err != nil {
		st := apierrors.NewInternalError(err)
		if e, ok := err.(*apierrors.StatusError); ok { //nolint:errorlint // as OpenSession returns it
			st = e
		}
		writeStatus(w, st)
		return
	}
	defer func() { _ = node.Close() }()
	w.Header().Set("Connection", "Upgrade")
	w.Header().Set("Upgrade", sessionUpgrade)
	w.WriteHeader(http.StatusSwitchingProtocols)
	c, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Time{})
	ended := make(chan struct{}, 2)
	go func() {
		_, _ = io.Copy(node, rw.Reader)
		ended <- struct{}{}
	}()
	go func() {
		_, _ = io.Copy(c, node)
		ended <- struct{}{}
	}()
	select { // a session ends as a whole
	case <-ended:
	case <-lost:
	}
}

// isServer says whether a request came from another server of this cluster.
func (s *Server) isServer(r *http.Request) bool {
	if r.TLS == nil {
		return false
	}
	peer, err := s.verifier.Peer(*r.TLS)
	return err == nil && peer.Kind == pki.ServerPeer && !s.removedServer(peer.UID)
}
