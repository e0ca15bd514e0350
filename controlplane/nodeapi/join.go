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
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/listener"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

// Join tokens are Secrets in kube-system, so that every server knows them
// and they are sealed like all others. The secret of the join line is not in
// them, only a key derived from it.
const (
	tokenNamespace                    = "kube-system"
	tokenPrefix                       = "join-token-"
	tokenLabel                        = "dunlin.dev/join-token"
	SecretTypeJoin  corev1.SecretType = "dunlin.dev/join-token"
	tokenKeyKey                       = "key"
	tokenKeyExpires                   = "expires"
	tokenKeyUses                      = "uses-left"
	tokenKeyUsedBy                    = "used-by" // the newest key ids, comma-separated
	// keptUsers bounds them: a key that comes again later is known by its Node.
	keptUsers    = 32
	tokenKeyFor  = "for"       // "server"; nodes otherwise
	tokenKeyName = "node-name" // of the node that joins; "" leaves it to that
)

// TokenOptions of CreateToken.
type TokenOptions struct {
	TTL  time.Duration // default 1 h
	Uses int           // default 1
	// Server: the line is for a server, which gets the keys of the cluster.
	Server bool
	// Name is what the node will be called, whatever it calls itself. Such a
	// token is for one node.
	Name string
}

// ErrTokenOptions says that a token like that cannot be made.
var ErrTokenOptions = errors.New("no such join token")

func (o TokenOptions) check() error {
	switch {
	case o.Name == "":
		return nil
	case o.Server:
		return fmt.Errorf("%w: a node's name, for a server", ErrTokenOptions)
	case o.Uses > 1:
		return fmt.Errorf("%w: one name for %d nodes", ErrTokenOptions, o.Uses)
	case CleanName(o.Name) != o.Name:
		return fmt.Errorf("%w: %q is no name of a node; %q would be", ErrTokenOptions, o.Name, CleanName(o.Name))
	}
	return nil
}

// CreateToken makes a join token and returns the line for the new node;
// servers are the addresses to put into it (default: Config.Servers).
func (s *Server) CreateToken(ctx context.Context, o TokenOptions, servers []string) (pki.JoinLine, error) {
	if err := errors.Join(o.check(), s.clockOK()); err != nil {
		return pki.JoinLine{}, err
	}
	if o.TTL <= 0 {
		o.TTL = time.Hour
	}
	if o.Uses <= 0 {
		o.Uses = 1
	}
	if len(servers) == 0 {
		servers = s.cfg.Servers()
	}
	line, err := pki.NewJoinLine(s.cfg.CA.Pin(), servers)
	if err != nil {
		return pki.JoinLine{}, err
	}
	sec := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: tokenNamespace, Name: tokenPrefix + line.ID, Labels: map[string]string{tokenLabel: "true"}},
		Type:       SecretTypeJoin,
		Data: map[string][]byte{
			tokenKeyKey:     pki.TokenKey(line.Secret),
			tokenKeyExpires: []byte(s.cfg.Clock.Now().Add(o.TTL).UTC().Format(time.RFC3339)),
			tokenKeyUses:    []byte(strconv.Itoa(o.Uses)),
		},
	}
	if o.Server {
		sec.Data[tokenKeyFor] = []byte(forServer)
	}
	if o.Name != "" {
		sec.Data[tokenKeyName] = []byte(o.Name)
	}
	if _, err = s.cfg.Store.Create(ctx, sec, registry.WriteOptions{}); err != nil {
		return pki.JoinLine{}, fmt.Errorf("nodeapi: keep join token: %w", err)
	}
	return line, nil
}

// errToken is a refusal that is told to the joining node. It says no more
// than is needed to act.
type errToken string

// Error implements error.
func (e errToken) Error() string { return string(e) }

const (
	errTokenUnknown errToken = "the join token is not known here: it expired, was removed, or is of another cluster; make a new one with: dunlin token create"
	errTokenExpired errToken = "the join token has expired; make a new one with: dunlin token create"
	errTokenUsed    errToken = "the join token was used already; make a new one with: dunlin token create"
	errTokenSecret  errToken = "the join token's secret is wrong; copy the whole line again"
	errTokenNode    errToken = "the join token is for a node; make one for a server with: dunlin token create --server"
	errTokenServer  errToken = "the join token is for a server ('dunlin server --join'); make one for a node with: dunlin token create"
)

const forServer = "server"

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

func (s *Server) tokenSecret(id string) (*corev1.Secret, error) {
	if !tokenID.MatchString(id) {
		return nil, errTokenUnknown
	}
	obj, err := s.cfg.Store.Get(secretGK, tokenNamespace, tokenPrefix+id)
	if apierrors.IsNotFound(err) {
		return nil, errTokenUnknown
	}
	if err != nil {
		return nil, err
	}
	sec, ok := obj.(*corev1.Secret)
	if !ok || sec.Type != SecretTypeJoin {
		return nil, errTokenUnknown
	}
	return sec, nil
}

var tokenID = regexp.MustCompile(`^[a-z2-7]{4,32}$`)

// checkToken returns the name that the token has for the node, if any.
func (s *Server) checkToken(cs tls.ConnectionState, req *wire.JoinRequest) (name string, err error) {
	sec, err := s.tokenSecret(req.TokenID)
	if err != nil {
		return "", err
	}
	if err := pki.CheckJoinProof(sec.Data[tokenKeyKey], cs, req.CSR, req.Proof); err != nil {
		return "", errTokenSecret
	}
	switch server := string(sec.Data[tokenKeyFor]) == forServer; {
	case server && !req.Server:
		return "", errTokenServer
	case !server && req.Server:
		return "", errTokenNode
	}
	return string(sec.Data[tokenKeyName]), s.fresh(sec)
}

// nameFree refuses a key that is not the one of the Node with a name that the
// operator chose: another name would be against his word.
func (s *Server) nameFree(name string, csr []byte) error {
	uid, err := NodeUID(csr)
	if err != nil {
		return err
	}
	cur, err := s.getNode(name)
	if apierrors.IsNotFound(err) || err == nil && cur.Spec.ProviderID == s.providerID(uid) {
		return nil
	}
	if err != nil {
		return err
	}
	return fmt.Errorf("the join token is for node %q, and that name belongs to a node with another key; 'dunlin delete node %[1]s' on the server frees it", name)
}

func (s *Server) fresh(sec *corev1.Secret) error {
	exp, err := time.Parse(time.RFC3339, string(sec.Data[tokenKeyExpires]))
	if err != nil || !s.cfg.Clock.Now().Before(exp) {
		return errTokenExpired
	}
	return nil
}

// useToken takes one use of the token for a key. The same key may come
// again: its first answer may have been lost. The uses of a token are taken
// one after the other: a rack that is switched on joins with one line, and
// would otherwise lose races for the Secret against itself.
func (s *Server) useToken(ctx context.Context, req *wire.JoinRequest, keyID string) error {
	if s.enrolled(req) {
		return nil
	}
	select {
	case s.tokens <- struct{}{}:
		defer func() { <-s.tokens }()
	case <-ctx.Done():
		return ctx.Err()
	}
	_, err := s.cfg.Store.Update(ctx, secretGK, tokenNamespace, tokenPrefix+req.TokenID, registry.Main, func(o runtime.Object) (runtime.Object, error) {
		sec, ok := o.(*corev1.Secret)
		if !ok {
			return nil, errTokenUnknown
		}
		if err := s.fresh(sec); err != nil {
			return nil, err
		}
		var by []string
		if b := string(sec.Data[tokenKeyUsedBy]); b != "" {
			by = strings.Split(b, ",")
		}
		if slices.Contains(by, keyID) {
			return sec, nil
		}
		left, err := strconv.Atoi(string(sec.Data[tokenKeyUses]))
		if err != nil || left <= 0 {
			return nil, errTokenUsed
		}
		sec.Data[tokenKeyUses] = []byte(strconv.Itoa(left - 1))
		sec.Data[tokenKeyUsedBy] = []byte(strings.Join(append(by[max(len(by)-keptUsers+1, 0):], keyID), ","))
		return sec, nil
	}, registry.WriteOptions{})
	if apierrors.IsNotFound(err) {
		return errTokenUnknown
	}
	return err
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
		notice = fmt.Sprintf("the name %q belongs to a node with another key, so this one is called %q. If this machine was %[1]s before it was set up anew: "+
			"'dunlin node declare-dead %[1]s' releases its pods and 'dunlin delete node %[1]s' frees the name; then 'dunlin agent reset' here and a new join line", wanted, name)
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
	zone := n.Labels[corev1.LabelTopologyZone]
	if zone == "" {
		zone = DefaultZone
	}
	return s.RotateKeyring(ctx, zone, true)
}

// dropTokens removes join tokens that expired a day ago: until then a node
// that comes late is told why.
func (s *Server) dropTokens(ctx context.Context) {
	var old []string
	s.cfg.Store.Reader(secretGK).Snapshot().Range(secretGK.String(), tokenNamespace, state.Key{}, func(r *state.Record) bool {
		if r.Header.Labels[tokenLabel] == "true" {
			old = append(old, r.Header.Key.Name)
		}
		return true
	})
	for _, name := range old {
		obj, err := s.cfg.Store.Get(secretGK, tokenNamespace, name)
		if err != nil {
			continue
		}
		sec, ok := obj.(*corev1.Secret)
		if !ok || sec.Type != SecretTypeJoin {
			continue
		}
		exp, err := time.Parse(time.RFC3339, string(sec.Data[tokenKeyExpires]))
		if err == nil && s.cfg.Clock.Now().Before(exp.Add(24*time.Hour)) {
			continue
		}
		if _, _, err := s.cfg.Store.Delete(ctx, secretGK, tokenNamespace, name, registry.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			s.warn("join-token", name, "expired join token not removed", err)
		}
	}
}
