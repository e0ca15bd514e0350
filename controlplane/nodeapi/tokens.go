package nodeapi

import (
	"cmp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/wire"
)

// autoExpiration is the life that admission writes into the volume it adds
// to pods; upstream's API server, too, takes it as "long, since nobody asked
// for short" (there a year). Tokens are bound to their pod and end with it;
// a short life would have every node write its flash every hour.
const (
	autoExpiration = 3607
	autoLife       = 30 * 24 * time.Hour
)

// SecretTypeToken marks the Secret-like objects of an assignment that hold
// ServiceAccount tokens; they exist nowhere else.
const SecretTypeToken corev1.SecretType = "dunlin.dev/projected-token"

// tokenWant is one serviceAccountToken source of a pod's volume.
type tokenWant struct {
	uid       string // of the object in the assignment
	namespace string
	pod       string
	podUID    string
	account   string
	audience  string
	life      time.Duration
}

// token is one that the node holds or shall get. value is empty for one that
// an earlier server issued and the node still has.
type token struct {
	want    tokenWant
	expires int64 // Unix seconds; also its version
	value   string
}

func podTokens(pod *corev1.Pod) []tokenWant {
	var out []tokenWant
	for i := range pod.Spec.Volumes {
		p := pod.Spec.Volumes[i].Projected
		if p == nil {
			continue
		}
		for _, src := range p.Sources {
			t := src.ServiceAccountToken
			if t == nil {
				continue
			}
			exp := int64(0)
			if t.ExpirationSeconds != nil {
				exp = *t.ExpirationSeconds
			}
			life := time.Duration(cmp.Or(exp, 3600)) * time.Second
			if exp == autoExpiration {
				life = autoLife
			}
			out = append(out, tokenWant{
				uid:       wire.TokenSecretName(string(pod.UID), t.Audience, exp),
				namespace: pod.Namespace, pod: pod.Name, podUID: string(pod.UID),
				account: cmp.Or(pod.Spec.ServiceAccountName, "default"), audience: t.Audience, life: life,
			})
		}
	}
	return out
}

// due says whether a token shall be replaced: after 80 % of its life, as
// upstream's kubelet does.
func (w tokenWant) due(expires int64, now time.Time) bool {
	left := time.Unix(expires, 0).Sub(now)
	return left < w.life/5 || left > 2*w.life
}

// adopt takes over the tokens that the node says it holds, so that a
// restarted server neither issues them again nor changes the generation.
func (n *nodeState) adopt(have map[string]uint64, now time.Time) {
	if again := n.again.Swap(false); n.adopted && !again {
		return
	}
	n.adopted = true
	for uid, version := range have {
		if len(uid) > len("token.") && uid[:len("token.")] == "token." && n.tokens[uid] == nil && time.Unix(int64(version), 0).After(now) {
			n.tokens[uid] = &token{expires: int64(version)}
		}
	}
}

// refreshTokens makes n.tokens be exactly what the pods want and not due.
func (a *assigner) refreshTokens(n *nodeState, wants []tokenWant) {
	if a.s.cfg.Tokens == nil {
		n.tokens = map[string]*token{}
		return
	}
	now := a.s.cfg.Clock.Now()
	next := make(map[string]*token, len(wants))
	for _, w := range wants {
		t := n.tokens[w.uid]
		if t != nil && !w.due(t.expires, now) {
			t.want = w
			next[w.uid] = t
			continue
		}
		if !n.adopted {
			continue // the node may hold it: it says so with its first pull
		}
		if t, err := a.issue(n.name, w); err != nil {
			a.s.warn("token", w.namespace+"/"+w.pod, "service account token not issued", err)
		} else {
			next[w.uid] = t
		}
	}
	n.tokens = next
}

func (a *assigner) issue(node string, w tokenWant) (*token, error) {
	obj, err := a.s.cfg.Store.Get(serviceAccountGK, w.namespace, w.account)
	if err != nil {
		return nil, err
	}
	sa, _ := obj.(*corev1.ServiceAccount)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: w.pod, UID: types.UID(w.podUID)}}
	pod.Spec.NodeName = node
	var aud []string
	if w.audience != "" {
		aud = []string{w.audience}
	}
	ref := &auth.Ref{Name: node}
	if n, err := a.s.getNode(node); err == nil {
		ref.UID = string(n.UID)
	}
	value, exp, err := a.s.cfg.Tokens.Issue(sa, pod, ref, aud, w.life)
	if err != nil {
		return nil, err
	}
	return &token{want: w, expires: exp.Unix(), value: value}, nil
}

// sendTokens adds the tokens to an answer.
func (a *assigner) sendTokens(n *nodeState, have map[string]uint64, out *wire.Assignment) error {
	uids := make([]string, 0, len(n.tokens))
	for uid := range n.tokens {
		uids = append(uids, uid)
	}
	slices.Sort(uids)
	reissued := false
	for _, uid := range uids {
		t := n.tokens[uid]
		if have[uid] == uint64(t.expires) {
			out.Keep = append(out.Keep, uid)
			continue
		}
		if t.value == "" { // adopted, but the node lost it
			fresh, err := a.issue(n.name, t.want)
			if err != nil {
				a.s.warn("token", t.want.namespace+"/"+t.want.pod, "service account token not issued", err)
				continue
			}
			n.tokens[uid], t, reissued = fresh, fresh, true
		}
		secret := &corev1.Secret{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
			ObjectMeta: metav1.ObjectMeta{Namespace: t.want.namespace, Name: uid, UID: types.UID(uid)},
			Type:       SecretTypeToken,
			Data:       map[string][]byte{corev1.ServiceAccountTokenKey: []byte(t.value)},
		}
		data, err := direct.Marshal(secret)
		if err != nil {
			return err
		}
		out.Objects = append(out.Objects, wire.Object{
			Ref: wire.Ref{Kind: "Secret", Namespace: t.want.namespace, Name: uid},
			UID: uid, ResourceVersion: uint64(t.expires), Data: data,
		})
	}
	if reissued {
		n.gen = n.hash(a.s)
		out.Generation = n.gen
	}
	return nil
}
