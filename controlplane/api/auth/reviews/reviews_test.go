package reviews

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/api/discovery"
	"github.com/dunlin-project/dunlin/internal/clock"
)

var now = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)

type objects map[string]runtime.Object

func (o objects) Get(gk schema.GroupKind, namespace, name string) (runtime.Object, error) {
	if obj, ok := o[gk.Kind+"/"+namespace+"/"+name]; ok {
		return obj, nil
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{Resource: strings.ToLower(gk.Kind) + "s"}, name)
}

// allowList allows what it lists, as "user verb resource".
type allowList []string

func (l allowList) Authorize(_ context.Context, a auth.Attributes) (bool, string) {
	what := a.User.Name + " " + a.Verb + " "
	if a.Path != "" {
		what += a.Path
	} else {
		what += a.Resource
		if a.Subresource != "" {
			what += "/" + a.Subresource
		}
		if a.Fields != nil && !a.Fields.Empty() {
			what += "?" + a.Fields.String()
		}
	}
	return slices.Contains(l, what), "asked: " + what
}

func (l allowList) RulesFor(context.Context, *auth.User, string) ([]auth.Rule, bool) {
	return []auth.Rule{{Verbs: []string{"get"}, APIGroups: []string{""}, Resources: []string{"pods"}}, {Verbs: []string{"get"}, NonResourceURLs: []string{"/x"}}}, true
}

func config(t *testing.T, allowed ...string) Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	clk := clock.Func(func() time.Time { return now })
	issuer, err := auth.NewIssuer(auth.IssuerConfig{Key: key, Clock: clk})
	if err != nil {
		t.Fatal(err)
	}
	store := objects{
		"ServiceAccount/d/robot": &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: "robot", UID: "u1"}},
		"Pod/d/p":                &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: "p", UID: "p1"}, Spec: corev1.PodSpec{ServiceAccountName: "robot", NodeName: "n"}},
		"Pod/d/other":            &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: "other", UID: "p2"}, Spec: corev1.PodSpec{ServiceAccountName: "else"}},
		"Secret/d/s":             &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: "s", UID: "s1"}},
		"Node//n":                &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "n1"}},
	}
	return Config{Authorizer: allowList(allowed), Tokens: auth.ServiceAccountTokens(issuer, store), Issuer: issuer, Objects: store, Clock: clk}
}

func review(t *testing.T, c Config, kind, namespace, name string, obj runtime.Object) (runtime.Object, error) {
	t.Helper()
	ctx := auth.WithUser(t.Context(), &auth.User{Name: "alice", UID: "7", Groups: []string{"ops"}, Extra: map[string][]string{"k": {"v"}}})
	for _, e := range All(c) {
		if e.GVK.Kind == kind {
			out, err := e.Review(ctx, namespace, name, obj)
			if err == nil && out.GetObjectKind().GroupVersionKind() != e.GVK {
				t.Errorf("the answer is a %s", out.GetObjectKind().GroupVersionKind())
			}
			return out, err
		}
	}
	t.Fatalf("no review %s", kind)
	return nil, nil
}

// TestAdvertised: discovery lists exactly what is served here.
func TestAdvertised(t *testing.T) {
	have := map[string]schema.GroupVersionKind{}
	for _, e := range All(config(t)) {
		name := e.GVR.GroupVersion().String() + " " + e.GVR.Resource
		if e.Subresource != "" {
			name += "/" + e.Subresource
		}
		have[name] = e.GVK
	}
	n := 0
	for _, r := range discovery.Resources(discovery.Features{}) {
		if r.Kind.Group != authenticationv1.GroupName && r.Kind.Group != authorizationv1.GroupName {
			continue
		}
		n++
		if have[r.GroupVersion.String()+" "+r.Name] != r.Kind {
			t.Errorf("%s %s is advertised and not served", r.GroupVersion, r.Name)
		}
	}
	if n != len(have) {
		t.Errorf("%d advertised, %d served", n, len(have))
	}
}

func TestSelfSubjectAccessReview(t *testing.T) {
	c := config(t, "alice get pods/log", "alice list pods?spec.nodeName=n", "alice get /metrics")
	for _, tc := range []struct {
		spec authorizationv1.SelfSubjectAccessReviewSpec
		want bool
	}{
		{authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "get", Resource: "pods", Subresource: "log"}}, true},
		{authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "get", Resource: "pods"}}, false},
		{authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "list", Resource: "pods", FieldSelector: &authorizationv1.FieldSelectorAttributes{RawSelector: "spec.nodeName=n"}}}, true},
		{authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "list", Resource: "pods", FieldSelector: &authorizationv1.FieldSelectorAttributes{
			Requirements: []metav1.FieldSelectorRequirement{{Key: "spec.nodeName", Operator: metav1.FieldSelectorOpIn, Values: []string{"n"}}},
		}}}, true},
		{authorizationv1.SelfSubjectAccessReviewSpec{NonResourceAttributes: &authorizationv1.NonResourceAttributes{Verb: "get", Path: "/metrics"}}, true},
		{authorizationv1.SelfSubjectAccessReviewSpec{NonResourceAttributes: &authorizationv1.NonResourceAttributes{Verb: "get"}}, false},
	} {
		out, err := review(t, c, "SelfSubjectAccessReview", "", "", &authorizationv1.SelfSubjectAccessReview{Spec: tc.spec})
		if err != nil {
			t.Fatal(err)
		}
		status := out.(*authorizationv1.SelfSubjectAccessReview).Status
		if status.Allowed != tc.want || status.Denied || status.Reason == "" {
			t.Errorf("%+v: %+v", tc.spec, status)
		}
	}
}

func TestAccessReviewErrors(t *testing.T) {
	ra := &authorizationv1.ResourceAttributes{Verb: "get", Resource: "pods", Namespace: "d"}
	na := &authorizationv1.NonResourceAttributes{Verb: "get", Path: "/x"}
	c := config(t, "bob get pods")
	for _, tc := range []struct {
		kind string
		obj  runtime.Object
		text string
	}{
		{"SelfSubjectAccessReview", &authorizationv1.SelfSubjectAccessReview{}, "exactly one of nonResourceAttributes or resourceAttributes must be specified"},
		{"SelfSubjectAccessReview", &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: ra, NonResourceAttributes: na}}, "cannot be specified in combination with resourceAttributes"},
		{"SelfSubjectAccessReview", &authorizationv1.SelfSubjectAccessReview{ObjectMeta: metav1.ObjectMeta{Name: "x"}, Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: ra}}, "must be empty"},
		{"SubjectAccessReview", &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{ResourceAttributes: ra}}, "at least one of user or group must be specified"},
		{"LocalSubjectAccessReview", &authorizationv1.LocalSubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: "bob", NonResourceAttributes: na}}, "disallowed on this kind of request"},
		{"LocalSubjectAccessReview", &authorizationv1.LocalSubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: "bob", ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: "e"}}}, "must match metadata.namespace"},
	} {
		_, err := review(t, c, tc.kind, "d", "", tc.obj)
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), tc.text) {
			t.Errorf("%s: %v, want %q", tc.kind, err, tc.text)
		}
	}
	if _, err := review(t, c, "SelfSubjectAccessReview", "", "", &corev1.Pod{}); !apierrors.IsInternalError(err) {
		t.Errorf("%v", err)
	}
}

func TestSubjectAccessReviews(t *testing.T) {
	c := config(t, "bob get pods")
	spec := authorizationv1.SubjectAccessReviewSpec{User: "bob", Extra: map[string]authorizationv1.ExtraValue{"k": {"v"}}, ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "get", Resource: "pods", Namespace: "d"}}
	out, err := review(t, c, "SubjectAccessReview", "", "", &authorizationv1.SubjectAccessReview{Spec: spec})
	if err != nil || !out.(*authorizationv1.SubjectAccessReview).Status.Allowed {
		t.Errorf("%v %v", out, err)
	}
	out, err = review(t, c, "LocalSubjectAccessReview", "d", "", &authorizationv1.LocalSubjectAccessReview{ObjectMeta: metav1.ObjectMeta{Namespace: "d"}, Spec: spec})
	if err != nil || !out.(*authorizationv1.LocalSubjectAccessReview).Status.Allowed {
		t.Errorf("%v %v", out, err)
	}
}

func TestSelfSubjectRulesReview(t *testing.T) {
	out, err := review(t, config(t), "SelfSubjectRulesReview", "", "", &authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: "d"}})
	if err != nil {
		t.Fatal(err)
	}
	status := out.(*authorizationv1.SelfSubjectRulesReview).Status
	if len(status.ResourceRules) != 1 || len(status.NonResourceRules) != 1 || !status.Incomplete {
		t.Errorf("%+v", status)
	}
	if _, err := review(t, config(t), "SelfSubjectRulesReview", "", "", &authorizationv1.SelfSubjectRulesReview{}); !apierrors.IsBadRequest(err) {
		t.Errorf("%v", err)
	}
}

func TestSelfSubjectReview(t *testing.T) {
	out, err := review(t, config(t), "SelfSubjectReview", "", "", &authenticationv1.SelfSubjectReview{})
	if err != nil {
		t.Fatal(err)
	}
	u := out.(*authenticationv1.SelfSubjectReview).Status.UserInfo
	if u.Username != "alice" || u.UID != "7" || u.Groups[0] != "ops" || u.Extra["k"][0] != "v" {
		t.Errorf("%+v", u)
	}
}

func tokenFor(t *testing.T, c Config, change func(*authenticationv1.TokenRequest)) (*authenticationv1.TokenRequest, error) {
	t.Helper()
	req := &authenticationv1.TokenRequest{}
	if change != nil {
		change(req)
	}
	out, err := review(t, c, "TokenRequest", "d", "robot", req)
	if err != nil {
		return nil, err
	}
	return out.(*authenticationv1.TokenRequest), nil
}

func TestTokenRequest(t *testing.T) {
	c := config(t)
	req, err := tokenFor(t, c, nil)
	if err != nil {
		t.Fatal(err)
	}
	if *req.Spec.ExpirationSeconds != 3600 || !req.Status.ExpirationTimestamp.Time.Equal(now.Add(time.Hour)) || req.Name != "robot" || req.Namespace != "d" ||
		!slices.Equal(req.Spec.Audiences, []string{auth.DefaultAudience}) || !req.CreationTimestamp.Time.Equal(now) {
		t.Errorf("%+v", req)
	}
	out, err := review(t, c, "TokenReview", "", "", &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: req.Status.Token}})
	if err != nil {
		t.Fatal(err)
	}
	status := out.(*authenticationv1.TokenReview).Status
	if !status.Authenticated || status.User.Username != "system:serviceaccount:d:robot" || status.User.UID != "u1" || status.Audiences[0] != auth.DefaultAudience || status.Error != "" {
		t.Errorf("%+v", status)
	}
}

func TestBoundTokenRequest(t *testing.T) {
	c := config(t)
	req, err := tokenFor(t, c, func(r *authenticationv1.TokenRequest) {
		r.Spec.Audiences = []string{"vault"}
		r.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: "p", UID: "p1"}
	})
	if err != nil {
		t.Fatal(err)
	}
	out, err := review(t, c, "TokenReview", "", "", &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: req.Status.Token, Audiences: []string{"vault", "x"}}})
	if err != nil {
		t.Fatal(err)
	}
	status := out.(*authenticationv1.TokenReview).Status
	if !status.Authenticated || !slices.Equal(status.Audiences, []string{"vault"}) || status.User.Extra[auth.ExtraPodName][0] != "p" || status.User.Extra[auth.ExtraNodeUID][0] != "n1" {
		t.Errorf("%+v", status)
	}
	// Not for the API server itself.
	out, err = review(t, c, "TokenReview", "", "", &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: req.Status.Token}})
	if err != nil || out.(*authenticationv1.TokenReview).Status.Authenticated {
		t.Errorf("%v %v", out, err)
	}
	for _, ref := range []authenticationv1.BoundObjectReference{{Kind: "Secret", Name: "s"}, {Kind: "Node", Name: "n", UID: "n1"}} {
		if _, err := tokenFor(t, c, func(r *authenticationv1.TokenRequest) { r.Spec.BoundObjectRef = &ref }); err != nil {
			t.Errorf("%v: %v", ref, err)
		}
	}
}

func TestTokenRequestErrors(t *testing.T) {
	bound := func(kind, name, uid string) func(*authenticationv1.TokenRequest) {
		return func(r *authenticationv1.TokenRequest) {
			r.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: kind, Name: name}
			r.Spec.BoundObjectRef.UID = "" + r.UID
			if uid != "" {
				r.Spec.BoundObjectRef.UID = "wrong"
			}
		}
	}
	for _, tc := range []struct {
		name   string
		change func(*authenticationv1.TokenRequest)
		reason metav1.StatusReason
		text   string
	}{
		{"too short", func(r *authenticationv1.TokenRequest) { s := int64(599); r.Spec.ExpirationSeconds = &s }, metav1.StatusReasonInvalid, "may not specify a duration less than 10 minutes"},
		{"too long", func(r *authenticationv1.TokenRequest) { s := int64(1<<32 + 1); r.Spec.ExpirationSeconds = &s }, metav1.StatusReasonInvalid, "may not specify a duration larger than 2^32 seconds"},
		{"another name", func(r *authenticationv1.TokenRequest) { r.Name = "x" }, metav1.StatusReasonInvalid, "must match the service account name"},
		{"another namespace", func(r *authenticationv1.TokenRequest) { r.Namespace = "x" }, metav1.StatusReasonInvalid, "must match the service account namespace"},
		{"another uid", func(r *authenticationv1.TokenRequest) { r.UID = "x" }, metav1.StatusReasonConflict, "does not match the UID of the service account"},
		{"a missing pod", bound("Pod", "nope", ""), metav1.StatusReasonNotFound, "not found"},
		{"a pod of another account", bound("Pod", "other", ""), metav1.StatusReasonBadRequest, "cannot bind token for serviceaccount"},
		{"a replaced pod", bound("Pod", "p", "x"), metav1.StatusReasonConflict, "does not match the UID in record"},
		{"a config map", bound("ConfigMap", "c", ""), metav1.StatusReasonBadRequest, "cannot bind token to object of type"},
	} {
		_, err := tokenFor(t, config(t), tc.change)
		if apierrors.ReasonForError(err) != tc.reason || !strings.Contains(err.Error(), tc.text) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	if _, err := review(t, config(t), "TokenRequest", "d", "nobody", &authenticationv1.TokenRequest{}); !apierrors.IsNotFound(err) {
		t.Errorf("%v", err)
	}
}

func TestTokenReviewErrors(t *testing.T) {
	c := config(t)
	if _, err := review(t, c, "TokenReview", "", "", &authenticationv1.TokenReview{}); !apierrors.IsBadRequest(err) {
		t.Errorf("%v", err)
	}
	if _, err := review(t, c, "TokenReview", "", "", &authenticationv1.TokenReview{ObjectMeta: metav1.ObjectMeta{Namespace: "d"}}); !apierrors.IsBadRequest(err) {
		t.Errorf("%v", err)
	}
	out, err := review(t, c, "TokenReview", "", "", &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: "nope"}})
	if err != nil || out.(*authenticationv1.TokenReview).Status.Authenticated || out.(*authenticationv1.TokenReview).Status.Error == "" {
		t.Errorf("%v %v", out, err)
	}
}
