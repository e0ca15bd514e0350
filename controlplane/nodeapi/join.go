package nodeapi

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/listener"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

// ServeJoin serves ALPNJoin: one request, one answer.
func (s *Server) ServeJoin(ctx context.Context, c *listener.Conn) {
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	req := new(wire.JoinRequest)
	if err := wire.ReadMessage(c, req); err != nil {
		return
	}
	reply, err := s.join(ctx, c.TLS, req)
	if passing(err) {
		s.warn("join", req.NodeName, "join not answered: it is asked for again", fmt.Errorf("%s: %w", c.RemoteAddr(), err))
		return
	}
	if err != nil {
		reply = &wire.JoinReply{Refused: err.Error()}
		s.warn("join", req.NodeName, "join refused", fmt.Errorf("%s: %w", c.RemoteAddr(), err))
	}
	_ = wire.WriteMessage(c, reply) // an answer that does not arrive is asked for again
}

// passing says that a join failed for a reason that goes away by itself, as
// while servers elect a leader: a refusal would end the agent that asks.
func passing(err error) bool {
	return errors.Is(err, state.ErrNoQuorum) || errors.Is(err, state.ErrNotLeader) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) ||
		apierrors.IsServiceUnavailable(err) || apierrors.IsTimeout(err) || apierrors.IsConflict(err) || apierrors.IsTooManyRequests(err)
}

func (s *Server) join(ctx context.Context, cs tls.ConnectionState, req *wire.JoinRequest) (*wire.JoinReply, error) {
	if cs.Version < tls.VersionTLS13 {
		return nil, errors.New("TLS 1.3 is needed")
	}
	if err := s.clockOK(); err != nil {
		return nil, fmt.Errorf("this server cannot issue certificates now: %w", err)
	}
	name, err := s.checkToken(cs, req)
	if errors.Is(err, errTokenUnknown) && s.cfg.Fresh != nil {
		// It may have been made on another server a moment ago.
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if s.cfg.Fresh(ctx) == nil {
			name, err = s.checkToken(cs, req)
		}
	}
	if err == nil && name != "" {
		req.NodeName = name
		err = s.nameFree(name, req.CSR)
	}
	if err != nil {
		return nil, err
	}
	keyID, err := pki.KeyID(req.CSR)
	if err != nil {
		return nil, err
	}
	if err := s.useToken(ctx, req, keyID); err != nil {
		return nil, err
	}
	if req.Server {
		return s.enrollServer(req.CSR)
	}
	return s.Enroll(ctx, req.NodeName, req.CSR, req.Facts)
}

// enrollServer issues a certificate for a server's key. With it the newcomer
// asks for what else a server needs; that it takes part is up to the leader.
func (s *Server) enrollServer(csr []byte) (*wire.JoinReply, error) {
	id, err := NodeUID(csr) // of its key, as a node's
	if err != nil {
		return nil, err
	}
	cert, err := s.cfg.CA.IssueServerCSR(csr, id)
	if err != nil {
		return nil, err
	}
	s.log.Info("certificate issued for a new server", "server", id)
	return &wire.JoinReply{
		Cert: cert.Raw, CA: s.cfg.CA.Cert.Raw, ClusterID: s.cfg.ClusterID, Epoch: s.cfg.Epoch(), NodeUID: id, Servers: s.cfg.Servers(),
	}, nil
}

// enrolled says that the key has a Node already, under the name it asks for
// or one derived from it.
func (s *Server) enrolled(req *wire.JoinRequest) bool {
	uid, err := NodeUID(req.CSR)
	if err != nil {
		return false
	}
	for _, n := range namesFor(req.NodeName, uid) {
		if cur, err := s.getNode(n); err == nil && cur.Spec.ProviderID == s.providerID(uid) {
			return true
		}
	}
	return false
}

// NodeUID is the identity of a node: it comes from its key, so that the same
// key is the same node whatever it is called.
func NodeUID(csr []byte) (string, error) {
	r, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		return "", fmt.Errorf("%w: %w", pki.ErrBadCSR, err)
	}
	sum := sha256.Sum256(r.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:16]), nil
}

// Enroll makes the Node object for a key and issues its certificate. It is
// what a join does after the token was checked, and what a server does for
// the node in its own process.
func (s *Server) Enroll(ctx context.Context, name string, csr []byte, facts map[string]string) (*wire.JoinReply, error) {
	uid, err := NodeUID(csr)
	if err != nil {
		return nil, err
	}
	if s.Revoked(uid, "") {
		return nil, fmt.Errorf("%w: this node's key was banned", pki.ErrRevoked)
	}
	if since, dead := s.Dead(uid); dead {
		return nil, errors.New(deadText(name, since))
	}
	wanted := CleanName(name)
	name, err = s.enrollNode(ctx, name, uid, facts)
	if err != nil {
		return nil, err
	}
	cert, err := s.cfg.CA.IssueNode(csr, name, uid)
	if err != nil {
		return nil, err
	}
	s.log.Info("node enrolled", "node", name, "uid", uid)
	notice := ""
	if name != wanted {
		// In this order, or what is released moves to the node that goes next.
		notice = fmt.Sprintf("the name %q belongs to a node with another key, so this one is called %q. If this machine was %[1]s before it was set up anew: "+
			"stop the agent and run 'dunlin agent reset' here; 'dunlin node declare-dead NAME', then 'dunlin delete node NAME', for both names, releases pods and frees the names; then join with a new line", wanted, name)
	}
	return &wire.JoinReply{
		Notice: notice,
		Cert:   cert.Raw, CA: s.cfg.CA.Cert.Raw, ClusterID: s.cfg.ClusterID, Epoch: s.cfg.Epoch(),
		NodeName: name, NodeUID: uid, Servers: s.cfg.Servers(),
	}, nil
}

// enrollNode finds or makes the Node object of an identity and returns its
// name: the wanted one, or, where another node has it, one with a suffix.
func (s *Server) enrollNode(ctx context.Context, want, uid string, facts map[string]string) (string, error) {
	id := s.providerID(uid)
	for _, n := range namesFor(want, uid) {
		cur, err := s.getNode(n)
		if err == nil && cur.Spec.ProviderID == id {
			return n, nil
		}
		if err == nil {
			continue // another node's, or one that a user wrote
		}
		if !apierrors.IsNotFound(err) {
			return "", err
		}
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n, Labels: map[string]string{corev1.LabelHostname: n}}}
		if len(facts) > 0 {
			if b, err := json.Marshal(facts); err == nil && len(b) <= 4096 {
				node.Annotations = map[string]string{AnnotationHardware: string(b)}
			}
		}
		err = s.createNode(ctx, node, uid)
		if err == nil {
			return n, nil
		}
		if !apierrors.IsAlreadyExists(err) {
			return "", err
		}
	}
	return "", fmt.Errorf("the name %q and those derived from it are taken; choose another with --name", CleanName(want))
}

// renew issues a new certificate to a connected node, also to one whose old
// certificate is outside its dates, as long as the cluster knows the node.
func (s *Server) renew(sess *session, r *wire.RenewRequest) *wire.RenewReply {
	refuse := func(format string, a ...any) *wire.RenewReply {
		return &wire.RenewReply{Refused: fmt.Sprintf(format, a...)}
	}
	if err := s.clockOK(); err != nil {
		return refuse("this server cannot issue certificates now: %v", err)
	}
	uid, err := NodeUID(r.CSR)
	if err != nil {
		return refuse("%v", err)
	}
	if uid != sess.uid {
		return refuse("the request is for another key")
	}
	n, err := s.getNode(sess.node)
	switch {
	case apierrors.IsNotFound(err) && sess.limited:
		return refuse("the cluster does not know node %s any more, and its certificate has expired; join again", sess.node)
	case err != nil && !apierrors.IsNotFound(err):
		return refuse("%v", err)
	case err == nil && n.Spec.ProviderID != s.providerID(uid):
		return refuse("the name %q belongs to another node now; join again", sess.node)
	}
	cert, err := s.cfg.CA.IssueNode(r.CSR, sess.node, sess.uid)
	if err != nil {
		return refuse("%v", err)
	}
	s.log.Info("node certificate renewed", "node", sess.node, "until", cert.NotAfter)
	return &wire.RenewReply{Cert: cert.Raw}
}

// revokedName is the Secret in kube-system whose keys are banned node uids.
const revokedName = "dunlin-revoked-nodes"

// Revoked says whether a node was banned; it is the hook of pki.Verifier.
func (s *Server) Revoked(uid, _ string) bool {
	_, banned := s.listed(revokedName, uid)
	return banned
}

// Count is how many Node objects there are.
func (s *Server) Count() int { return len(s.nodeNames()) }

// SecretsOn lists the Secrets ("namespace/name") that the pods bound to a
// node refer to, and those of Ingresses that it serves: what it holds, and what is known to whoever took it.
func (s *Server) SecretsOn(node string) ([]string, error) {
	var out []string
	var failed error
	snap := s.cfg.Store.Reader(podGK).Snapshot()
	snap.PodsOnNode(node, func(rec *state.Record) bool {
		e, err := s.assign.describe(rec)
		if err != nil {
			failed = fmt.Errorf("nodeapi: pod %s/%s: %w", rec.Header.Key.Namespace, rec.Header.Key.Name, err)
			return false
		}
		for _, k := range e.refs {
			if _, ok := snap.Get(k); ok && k.Kind == secretGK.Kind {
				out = append(out, k.Namespace+"/"+k.Name)
			}
		}
		return true
	})
	for _, k := range s.assign.tlsRefs(snap, node) {
		if rec, ok := snap.Get(k); ok && s.assign.certificate(rec) {
			out = append(out, k.Namespace+"/"+k.Name)
		}
	}
	slices.Sort(out)
	return slices.Compact(out), failed
}

// Revoke bans a node's identity and cuts its connection. The Node object
// stays.
func (s *Server) Revoke(ctx context.Context, node string) error {
	n, err := s.getNode(node)
	if err != nil {
		return err
	}
	uid, err := s.uidOf(n)
	if err != nil {
		return err
	}
	if err := s.list(ctx, revokedName, uid); err != nil {
		return fmt.Errorf("nodeapi: revoke %s: %w", node, err)
	}
	s.Disconnect(node, pki.ErrRevoked)
	if err = s.markRevoked(ctx, n, uid); err != nil {
		err = fmt.Errorf("nodeapi: %s is revoked, but its Node does not say so: %w", node, err)
	}
	zone := n.Labels[corev1.LabelTopologyZone]
	if zone == "" {
		zone = DefaultZone
	}
	return errors.Join(err, s.RotateKeyring(ctx, zone, true))
}
