// Package reviews answers the kinds that are posted and never stored:
// SubjectAccessReview and its kin (authorization.k8s.io/v1), TokenReview and
// SelfSubjectReview (authentication.k8s.io/v1), and TokenRequest on a
// ServiceAccount.
//
// It is stateless; decoding, content negotiation and encoding belong to the
// API server, which finds the reviews by All.
package reviews

import (
	"context"
	"fmt"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/internal/clock"
)

// Review answers one posted object. obj is decoded and private; the user is
// in ctx (auth.UserFrom). name is that of the parent where the review is a
// sub-resource. Errors are *apierrors.StatusError.
type Review func(ctx context.Context, namespace, name string, obj runtime.Object) (runtime.Object, error)

// Entry is where a Review is served, and as what its body is decoded.
type Entry struct {
	GVR         schema.GroupVersionResource
	Subresource string // "" for a resource of its own
	GVK         schema.GroupVersionKind
	Review      Review
}

// Config is what the reviews need; all of it is required.
type Config struct {
	Authorizer auth.Authorizer
	// Tokens are the checkers that authenticate requests, for TokenReview.
	Tokens auth.Tokens
	// Issuer signs what TokenRequest asks for.
	Issuer  *auth.Issuer
	Objects auth.Getter
	Clock   clock.Clock
}

// All lists the reviews.
func All(cfg Config) []Entry {
	authn, authz := authenticationv1.SchemeGroupVersion, authorizationv1.SchemeGroupVersion
	entry := func(gv schema.GroupVersion, resource, kind string, r Review) Entry {
		return Entry{GVR: gv.WithResource(resource), GVK: gv.WithKind(kind), Review: r}
	}
	list := []Entry{
		entry(authz, "selfsubjectaccessreviews", "SelfSubjectAccessReview", cfg.selfAccess),
		entry(authz, "subjectaccessreviews", "SubjectAccessReview", cfg.access),
		entry(authz, "localsubjectaccessreviews", "LocalSubjectAccessReview", cfg.localAccess),
		entry(authz, "selfsubjectrulesreviews", "SelfSubjectRulesReview", cfg.selfRules),
		entry(authn, "selfsubjectreviews", "SelfSubjectReview", cfg.self),
		entry(authn, "tokenreviews", "TokenReview", cfg.token),
		{
			GVR: schema.GroupVersionResource{Version: "v1", Resource: "serviceaccounts"}, Subresource: "token",
			GVK: authn.WithKind("TokenRequest"), Review: cfg.tokenRequest,
		},
	}
	for i := range list {
		gvk, review := list[i].GVK, list[i].Review
		list[i].Review = func(ctx context.Context, namespace, name string, obj runtime.Object) (runtime.Object, error) {
			out, err := review(ctx, namespace, name, obj)
			if err != nil {
				return nil, err
			}
			out.GetObjectKind().SetGroupVersionKind(gvk)
			return out, nil
		}
	}
	return list
}

// wrongType says that the server decoded a body as another kind: a defect.
func wrongType(obj runtime.Object) error {
	return apierrors.NewInternalError(fmt.Errorf("reviews: unexpected body %T", obj))
}

// invalid returns a 422 if there are errors.
func invalid(gk schema.GroupKind, errs field.ErrorList) error {
	if len(errs) == 0 {
		return nil
	}
	return apierrors.NewInvalid(gk, "", errs)
}

func gk(kind string) schema.GroupKind {
	return schema.GroupKind{Group: authorizationv1.GroupName, Kind: kind}
}

// emptyMeta refuses metadata other than what clients add by themselves.
func emptyMeta(m metav1.ObjectMeta) field.ErrorList {
	m.ManagedFields, m.CreationTimestamp = nil, metav1.Time{}
	if apiequality.Semantic.DeepEqual(m, metav1.ObjectMeta{}) {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("metadata"), m, "must be empty")}
}

// checkSpec demands exactly one kind of attributes.
func checkSpec(r *authorizationv1.ResourceAttributes, n *authorizationv1.NonResourceAttributes) field.ErrorList {
	path := field.NewPath("spec")
	switch {
	case r != nil && n != nil:
		return field.ErrorList{field.Invalid(path.Child("nonResourceAttributes"), n, "cannot be specified in combination with resourceAttributes")}
	case r == nil && n == nil:
		return field.ErrorList{field.Invalid(path.Child("resourceAttributes"), n, "exactly one of nonResourceAttributes or resourceAttributes must be specified")}
	}
	return nil
}

// attributes turns a review's question into the authorizer's.
func attributes(u *auth.User, r *authorizationv1.ResourceAttributes, n *authorizationv1.NonResourceAttributes) auth.Attributes {
	a := auth.Attributes{User: u}
	if n != nil {
		a.Verb, a.Path = n.Verb, n.Path
		if a.Path == "" {
			a.Path = "/"
		}
		return a
	}
	a.Verb, a.APIGroup, a.APIVersion = r.Verb, r.Group, r.Version
	a.Resource, a.Subresource, a.Namespace, a.Name = r.Resource, r.Subresource, r.Namespace, r.Name
	a.Fields = fieldSelector(r.FieldSelector)
	return a
}

// fieldSelector keeps the requirements that a field selector can express;
// dropping others only makes the question broader, so never grants more.
func fieldSelector(f *authorizationv1.FieldSelectorAttributes) fields.Selector {
	if f == nil {
		return nil
	}
	if f.RawSelector != "" {
		s, err := fields.ParseSelector(f.RawSelector)
		if err != nil {
			return nil
		}
		return s
	}
	var list []fields.Selector
	for _, r := range f.Requirements {
		switch {
		case r.Operator == metav1.FieldSelectorOpIn && len(r.Values) == 1:
			list = append(list, fields.OneTermEqualSelector(r.Key, r.Values[0]))
		case r.Operator == metav1.FieldSelectorOpNotIn && len(r.Values) == 1:
			list = append(list, fields.OneTermNotEqualSelector(r.Key, r.Values[0]))
		}
	}
	return fields.AndSelectors(list...)
}

// decide asks the authorizer. A refusal is "no opinion", not "denied":
// nothing here says no for ever.
func (c Config) decide(ctx context.Context, a auth.Attributes) authorizationv1.SubjectAccessReviewStatus {
	allowed, reason := c.Authorizer.Authorize(ctx, a)
	return authorizationv1.SubjectAccessReviewStatus{Allowed: allowed, Reason: reason}
}

func (c Config) selfAccess(ctx context.Context, _, _ string, obj runtime.Object) (runtime.Object, error) {
	o, ok := obj.(*authorizationv1.SelfSubjectAccessReview)
	if !ok {
		return nil, wrongType(obj)
	}
	errs := append(checkSpec(o.Spec.ResourceAttributes, o.Spec.NonResourceAttributes), emptyMeta(o.ObjectMeta)...)
	if err := invalid(gk("SelfSubjectAccessReview"), errs); err != nil {
		return nil, err
	}
	u, ok := auth.UserFrom(ctx)
	if !ok {
		return nil, apierrors.NewBadRequest("no user present on request")
	}
	o.Status = c.decide(ctx, attributes(u, o.Spec.ResourceAttributes, o.Spec.NonResourceAttributes))
	return o, nil
}

// subject is the user that a review asks about.
func subject(s *authorizationv1.SubjectAccessReviewSpec) *auth.User {
	u := &auth.User{Name: s.User, UID: s.UID, Groups: s.Groups}
	for k, v := range s.Extra {
		if u.Extra == nil {
			u.Extra = map[string][]string{}
		}
		u.Extra[k] = v
	}
	return u
}

func checkSubject(s *authorizationv1.SubjectAccessReviewSpec) field.ErrorList {
	errs := checkSpec(s.ResourceAttributes, s.NonResourceAttributes)
	if s.User == "" && len(s.Groups) == 0 {
		errs = append(errs, field.Invalid(field.NewPath("spec", "user"), s.User, "at least one of user or group must be specified"))
	}
	return errs
}

func (c Config) access(ctx context.Context, _, _ string, obj runtime.Object) (runtime.Object, error) {
	o, ok := obj.(*authorizationv1.SubjectAccessReview)
	if !ok {
		return nil, wrongType(obj)
	}
	if err := invalid(gk("SubjectAccessReview"), append(checkSubject(&o.Spec), emptyMeta(o.ObjectMeta)...)); err != nil {
		return nil, err
	}
	o.Status = c.decide(ctx, attributes(subject(&o.Spec), o.Spec.ResourceAttributes, o.Spec.NonResourceAttributes))
	return o, nil
}

func (c Config) localAccess(ctx context.Context, namespace, _ string, obj runtime.Object) (runtime.Object, error) {
	o, ok := obj.(*authorizationv1.LocalSubjectAccessReview)
	if !ok {
		return nil, wrongType(obj)
	}
	errs := checkSubject(&o.Spec)
	meta := o.ObjectMeta
	meta.Namespace = ""
	errs = append(errs, emptyMeta(meta)...)
	if o.Spec.NonResourceAttributes != nil {
		errs = append(errs, field.Invalid(field.NewPath("spec", "nonResourceAttributes"), o.Spec.NonResourceAttributes, "disallowed on this kind of request"))
	}
	if o.Spec.ResourceAttributes != nil && o.Spec.ResourceAttributes.Namespace != namespace {
		errs = append(errs, field.Invalid(field.NewPath("spec", "resourceAttributes", "namespace"), o.Spec.ResourceAttributes.Namespace, "must match metadata.namespace"))
	}
	if err := invalid(gk("LocalSubjectAccessReview"), errs); err != nil {
		return nil, err
	}
	o.Status = c.decide(ctx, attributes(subject(&o.Spec), o.Spec.ResourceAttributes, nil))
	return o, nil
}

func (c Config) selfRules(ctx context.Context, _, _ string, obj runtime.Object) (runtime.Object, error) {
	o, ok := obj.(*authorizationv1.SelfSubjectRulesReview)
	if !ok {
		return nil, wrongType(obj)
	}
	u, ok := auth.UserFrom(ctx)
	if !ok {
		return nil, apierrors.NewBadRequest("no user present on request")
	}
	if o.Spec.Namespace == "" {
		return nil, apierrors.NewBadRequest("no namespace on request")
	}
	o.Status = authorizationv1.SubjectRulesReviewStatus{
		ResourceRules: []authorizationv1.ResourceRule{}, NonResourceRules: []authorizationv1.NonResourceRule{},
	}
	ruler, ok := c.Authorizer.(auth.Ruler)
	if !ok {
		o.Status.Incomplete = true
		o.Status.EvaluationError = "the authorizer of this server cannot list rules"
		return o, nil
	}
	rules, incomplete := ruler.RulesFor(ctx, u, o.Spec.Namespace)
	o.Status.Incomplete = incomplete
	for _, r := range rules {
		if len(r.NonResourceURLs) > 0 {
			o.Status.NonResourceRules = append(o.Status.NonResourceRules, authorizationv1.NonResourceRule{Verbs: r.Verbs, NonResourceURLs: r.NonResourceURLs})
			continue
		}
		o.Status.ResourceRules = append(o.Status.ResourceRules, authorizationv1.ResourceRule{
			Verbs: r.Verbs, APIGroups: r.APIGroups, Resources: r.Resources, ResourceNames: r.ResourceNames,
		})
	}
	return o, nil
}
