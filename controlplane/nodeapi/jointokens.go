package nodeapi

import (
	"context"
	"crypto/tls"
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
var ErrTokenOptions = errors.New("no join token was made")

func (o TokenOptions) check() error {
	clean := CleanName(o.Name)
	switch {
	case o.Server && o.Uses > 1:
		return fmt.Errorf("%w: --server gives away the keys of the cluster, to one server: leave --uses=%d out", ErrTokenOptions, o.Uses)
	case o.Name == "":
		return nil
	case o.Server:
		return fmt.Errorf("%w: --server makes one for a server, and --node-name=%s is for a node: leave one of them out", ErrTokenOptions, o.Name)
	case o.Uses > 1:
		return fmt.Errorf("%w: --node-name=%s is the name of one node, and --uses=%d lets %[3]d join: leave one of them out", ErrTokenOptions, o.Name, o.Uses)
	case clean == "":
		return fmt.Errorf("%w: --node-name=%s is no name for a node: small letters, digits, '-' and '.' are wanted", ErrTokenOptions, o.Name)
	case clean != o.Name:
		return fmt.Errorf("%w: --node-name=%s is no name for a node; %s would be one", ErrTokenOptions, o.Name, clean)
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

// checkToken returns the name that the token has for the node, if any, and
// why it may not be used.
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
	if err := s.fresh(sec); err != nil || s.enrolled(req) {
		return string(sec.Data[tokenKeyName]), err
	}
	keyID, err := pki.KeyID(req.CSR)
	if err != nil {
		return "", err
	}
	_, _, err = uses(sec, keyID)
	return string(sec.Data[tokenKeyName]), err
}

// uses says how often the token may still be used by other keys than those
// that have used it; errTokenUsed if keyID is none of them and it may not.
func uses(sec *corev1.Secret, keyID string) (left int, by []string, err error) {
	if b := string(sec.Data[tokenKeyUsedBy]); b != "" {
		by = strings.Split(b, ",")
	}
	left, err = strconv.Atoi(string(sec.Data[tokenKeyUses]))
	if (err != nil || left <= 0) && !slices.Contains(by, keyID) {
		return 0, by, errTokenUsed
	}
	return left, by, nil
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
	if slices.ContainsFunc(cur.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	}) {
		return fmt.Errorf("the join token is for node %q, and that is another machine, which is Ready: make a line with another --node-name, or with none", name)
	}
	// In this order, or what is released moves to the node that goes next.
	return fmt.Errorf("the join token is for node %q, and that name belongs to a node with another key. If this machine takes its place: "+
		"'dunlin node declare-dead %[1]s', then 'dunlin delete node %[1]s' on the server, release its pods and free the name; then join again", name)
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
		left, by, err := uses(sec, keyID)
		if err != nil || slices.Contains(by, keyID) {
			return sec, err
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
